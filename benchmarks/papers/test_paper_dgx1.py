"""Mojumder et al. 2018 beside what the plans say."""

from itertools import combinations, permutations
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from paceline.core.machine import Machine
from paceline.core.plan import Kind, Plan
from paceline.core.simulate import simulate
from paceline.core.strategy import Window
from paceline.core.workload import replica_nbytes
from paceline.records.machine_file import read_machine
from paceline.strategies.tree import plan as tree
from paceline.strategies.tree.config import Tree
from paceline.training.models.describe import describe
from papers import dgx1 as mxnet
from papers import dgx1_memory, paper
from papers.dgx1 import LayerCounts, counts, workload
from papers.dgx1_memory import KeepsInputs, memory_gb
from papers.headline import headline
from papers.paper_markdown import markdown, shown_tables
from papers.paper_tables import (
    Basis,
    Paper,
    PaperTable,
    printed_values,
    read_printed,
)

pytestmark = pytest.mark.slow  # plans many cells


@pytest.fixture(scope="module")
def dgx1() -> Machine:
    return read_machine(Path("machines/dgx1-v100.toml"))


@pytest.fixture(scope="module")
def found() -> Paper:
    return paper("dgx1")


def nvlinks(machine: Machine) -> dict[frozenset[str], int]:
    """Return the number of NVLinks between two GPUs."""
    return {
        frozenset(link.between): round(link.bandwidth_bytes_per_s / 25e9)
        for link in machine.links
        if all(end.startswith("gpu") for end in link.between)
    }


def places(machine: Machine, source: int, target: int) -> list[str]:
    route = machine.route(machine.devices[source], machine.devices[target])
    return [route[0].source, *(hop.target for hop in route)]


def test_links_are_those_that_the_text_names(dgx1: Machine) -> None:
    links = nvlinks(dgx1)

    def between(one: int, other: int) -> int:
        return links.get(frozenset({f"gpu{one}", f"gpu{other}"}), 0)

    assert [between(*pair) for pair in ((0, 1), (0, 2), (0, 3), (2, 3))] == [2, 2, 1, 1]
    assert all(between(*pair) for pair in ((0, 6), (1, 7)))
    assert not any(between(*pair) for pair in ((3, 4), (0, 4), (0, 5), (0, 7)))
    assert all(between(*pair) for half in (range(4), range(4, 8)) for pair in combinations(half, 2))
    for device in dgx1.devices:
        assert sum(number for ends, number in links.items() if device.name in ends) == 6


def test_a_message_takes_at_most_two_hops_over_a_neighbour(dgx1: Machine) -> None:
    assert places(dgx1, 0, 7) == ["gpu0", "gpu1", "gpu7"]  # section V-A
    assert places(dgx1, 0, 4) == ["gpu0", "gpu2", "gpu4"]  # both links are double
    for source, target in permutations(range(8), 2):
        direct = frozenset({f"gpu{source}", f"gpu{target}"}) in nvlinks(dgx1)
        assert len(places(dgx1, source, target)) == (2 if direct else 3)
    # Without NVLink it goes through the processors.
    pcie = tuple(link for link in dgx1.links if "socket" in link.name)
    plain = dgx1.model_copy(update={"links": pcie})
    assert places(plain, 0, 3) == ["gpu0", "socket0", "gpu3"]
    assert places(plain, 0, 4) == ["gpu0", "socket0", "socket1", "gpu4"]


def test_gpus_are_fed_one_after_another(dgx1: Machine) -> None:
    plan = tree.plan(workload("LeNet", 16), dgx1, Tree(workers=4), Window(1))
    fed = mxnet.fed_in_turn(plan)
    assert [task.name for task in fed.tasks] == [task.name for task in plan.tasks]
    one_second_each = SimpleNamespace(seconds=lambda task: 1.0)

    def starts(plan: Plan) -> list[float]:
        spans = simulate(plan, one_second_each).spans
        return [span.start_s for span in spans if span.kind is Kind.LOAD]

    assert starts(plan) == [0, 0, 0, 0]
    assert starts(fed) == [0, 1, 2, 3]


def test_a_step_is_the_closed_form_of_its_strategy(dgx1: Machine) -> None:
    # Messages of a tree go at half of NVLink's bandwidth; of four GPUs the slowest are those
    # between gpu2 and gpu3, over one link, and then gpu0 and gpu2, over two.
    work = workload("AlexNet", 16)
    first = dgx1.devices[0]
    alone_s = mxnet.step_s("AlexNet", 16, "P2P", 1)
    nbytes = work.gradient_nbytes
    sends_s = sum(2 * (10e-6 + nbytes / (mxnet.COPY_EFFICIENCY * rate)) for rate in (25e9, 50e9))
    adds_s = 2 * (first.call_latency_s + 3 * nbytes / first.memory_bandwidth_bytes_per_s)
    expected_s = alone_s + 3 * mxnet.ISSUE_S["P2P"] + sends_s + adds_s
    assert mxnet.step_s("AlexNet", 16, "P2P", 4) == pytest.approx(expected_s, rel=5e-3)


def table(found: Paper, title: str) -> PaperTable:
    (one,) = (one for one in found.tables if one.title.startswith(title))
    return one


def test_table_i_is_shown_whole_with_the_cells_that_differ(found: Paper) -> None:
    names = ("LeNet", "AlexNet", "GoogLeNet", "Inception-v3", "ResNet")
    shown = {tuple(of[:2]) for of in printed_values("dgx1", "table 1")}
    assert shown == {(name, field) for name in names for field in LayerCounts._fields}
    cells = table(found, "Table I:").cells
    assert {cell.basis for cell in cells} == {Basis.EXACT}
    assert {cell.name: (cell.printed, cell.ours) for cell in cells if not cell.agrees} == {
        "LeNet, fully connected": (2, 3),
        "Inception-v3, convolutions": (7, 5),
        "ResNet (as ResNet-110), convolutions": (107, 109),
        "GoogLeNet, weights": (4e6, 7e6),
        "ResNet (as ResNet-110), weights": (55e6, 2e6),
    }
    weights = [counts(name).weights for name in names]
    assert weights == [61_706, 60_965_224, 6_998_552, 23_834_568, 1_727_962]
    assert workload("ResNet", 16).num_parameters == 25_557_032  # in all other tables


def test_calibrated_cells_reproduce_what_they_were_taken_from(found: Paper) -> None:
    taken = {
        cell.name
        for title in ("Section V-A: LeNet", "Section V-A: P2P")
        for cell in table(found, title).cells
        if cell.basis is Basis.CALIBRATED and abs(cell.error or 0.0) < 0.005
    }
    assert taken == {"P2P, 4 GPUs", "NCCL, 4 GPUs", "GoogLeNet, 4 GPUs"}
    slower = {cell.name: cell for cell in table(found, "Table II: the same").cells}
    assert slower["GoogLeNet, batch 16"].error == pytest.approx(0.0, abs=0.005)
    # A constant was taken from this table: none of its cells is counted as a prediction.
    assert {cell.basis for cell in slower.values()} == {Basis.CALIBRATED}


def test_table_ii_prices_two_kernels_of_each_tensor(found: Paper) -> None:
    cells = {cell.name: cell for cell in table(found, "Table II: NCCL").cells}
    assert len(cells) == 15
    assert {cell.basis for cell in cells.values()} == {Basis.PREDICTED}
    # AlexNet: 16 tensors, 243.9 MB that are read and written twice, at the V100's 750 GB/s.
    alone_s = mxnet.planned_s("AlexNet", 16, "NCCL")
    kernels_s = 2 * 16 * 5e-6 + 4 * 4 * 60_965_224 / 750e9
    assert cells["AlexNet, batch 16"].ours == pytest.approx(1 + kernels_s / alone_s, rel=1e-3)
    # Their time does not grow with the batch, and the printed share does not fall: a limit.
    one = headline(cells.values())
    assert one.mean.error < 0.03 < one.error < 0.14


def test_activations_keep_their_inputs_and_their_outputs() -> None:
    # A convolution without bias, a normalisation and a rectifier: with PyTorch's in-place rectifier
    # the maps of the first and the last stay, with MXNet's of 2018 all three.
    def net() -> nn.Module:
        layers = (nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        return nn.Sequential(*layers, nn.Conv2d(4, 4, 1, bias=False))

    images = torch.empty(8, 4, 32, 32)
    plain = replica_nbytes(describe(net(), images))
    with KeepsInputs():
        kept = replica_nbytes(describe(net(), images))
    assert kept - plain == pytest.approx(images.nbytes, abs=4096)


@pytest.mark.parametrize("build", [nn.ReLU, lambda: functional.relu])
def test_gradients_are_a_rectifiers(build) -> None:
    x = torch.linspace(-2, 2, 9, requires_grad=True)
    with KeepsInputs():
        y = build()(x)
    y.sum().backward()
    assert torch.equal(y.detach(), x.detach().clamp_min(0))
    assert torch.equal(x.grad, (x.detach() > 0).float())


def test_the_lenet_of_table_iv_is_mxnets_example(found: Paper) -> None:
    # conv 20 of 5x5x3, conv 50 of 5x5x20, 50 x 53 x 53 to 500, and 500 to 1,000 classes.
    counted = (75 * 20 + 20) + (500 * 50 + 50) + (140_450 * 500 + 500) + (500 * 1000 + 1000)
    work = dgx1_memory.workload("LeNet", 16)
    assert work.num_parameters == counted == 70_753_070
    # Three of its gradients are what GPU 0 holds more in the paper, in cells that are calibrated.
    printed = printed_values("dgx1", "table 4")
    more_gb = printed["GPU0", "LeNet", 16] - printed["GPUx", "LeNet", 16]
    assert 3 * work.gradient_nbytes / 1e9 == pytest.approx(more_gb, rel=0.07)


def test_gpu_0_serves_and_the_others_keep_no_momentum() -> None:
    for name, before_gb in (("LeNet", 1.37), ("AlexNet", 1.24)):
        work = dgx1_memory.workload(name, 16)
        # Of a replica's weights, gradients and momentum the gradients alone come on top.
        own = before_gb + (replica_nbytes(work) - 2 * work.gradient_nbytes) / 1e9
        assert memory_gb(name, 16, "GPUx") == pytest.approx(own)
        assert memory_gb(name, 16) == pytest.approx(own + 3 * work.gradient_nbytes / 1e9)


def test_all_of_table_iv_is_shown(found: Paper) -> None:
    cells = table(found, "Table IV: memory").cells
    assert len(cells) == 5 * 3 * 2
    calibrated = {cell.name for cell in cells if cell.basis is Basis.CALIBRATED}
    # In view of these four two networks were chosen.
    named = ("ResNet (as ResNet-50)", "LeNet (as MXNet's)")
    assert calibrated == {f"{name}, batch 16, GPU{which}" for name in named for which in "0x"}


def test_which_method_is_faster_is_counted_once(found: Paper) -> None:
    # That NCCL is faster where it is 1.2 times as fast is no second prediction.
    choices = table(found, "Section V-A: the faster").cells
    predicted = {cell.name: cell.agrees for cell in choices if cell.basis is Basis.PREDICTED}
    assert predicted == {"AlexNet, 4 GPUs": False, "AlexNet, 8 GPUs": False}
    assert [cell.name for cell in choices if not cell.agrees] == list(predicted)


def test_the_planner_is_near_and_nearer_than_both_naive_predictors(found: Paper) -> None:
    whole = headline(found.cells)
    assert whole.mean.ours < 0.6 * whole.mean.error
    assert whole.alpha_beta.ours < 0.6 * whole.alpha_beta.error
    cells = [c for one in found.tables if "Section V-A" in one.title for c in one.cells]
    one = headline(cells)
    assert one.num_predicted == 12
    assert one.error < 0.05


def test_alpha_beta_is_what_a_pencil_makes_of_it(found: Paper) -> None:
    # LeNet on two GPUs: 61,706 gradients to GPU 0 and back, two NVLinks and 10 us each way.
    cells = {cell.name: cell for cell in table(found, "Section V-A: LeNet").cells}
    alone_s = mxnet.planned_s("LeNet", 16, "P2P")
    exchange_s = 2 * (10e-6 + 4 * 61_706 / 50e9)
    naive = cells["P2P, 2 GPUs"].naive
    assert naive.alpha_beta == pytest.approx(2 * alone_s / (alone_s + exchange_s))
    efficiencies = [1.62 / 2, 2.37 / 4, 3.36 / 8, 1.56 / 2, 2.27 / 4, 2.77 / 8]
    assert naive.mean == pytest.approx(2 * sum(efficiencies) / 6)
    # One GPU exchanges nothing.
    assert all(cell.naive.alpha_beta == 1.0 for cell in table(found, "Table II: NCCL").cells)


def test_the_readme_has_these_tables(found: Paper) -> None:
    assert shown_tables("dgx1") == markdown(found)


def test_misprints_of_table_iv_are_misprints() -> None:
    # Its own columns say so: GPU0 has 6.2 % more than the others, and grew by 56.1 %.
    memory_gb = printed_values("dgx1", "table 4")
    assert memory_gb["GPU0", "ResNet", 32] / 1.062 == pytest.approx(5.33, abs=0.005)
    assert memory_gb["GPUx", "ResNet", 32] == 5.63
    # Before training nothing depends on the batch, for any other network.
    for name, before in read_printed("dgx1")["before_gb"].items():
        assert (max(before) - min(before) > 0.06) == (name == "ResNet")
