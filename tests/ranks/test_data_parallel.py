"""What paceline.DataParallel does that torch's own does not: see programs for what both do."""

import copy
import re
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from paceline import DataParallel
from paceline.core.errors import StepDiscarded
from paceline.data import load
from pair import Failure, Ranks
from refusals import refused
from replicas import (
    Net,
    batch,
    bits,
    build,
    check,
    distance,
    mean,
    parallel_of,
    sgd,
    square,
    train,
)

EXCHANGES = ("allreduce", "tree", "host")
PLACES = [*((one, "pair") for one in EXCHANGES), ("host", "pair_on_gpus")]
MARKED = [*PLACES[:3], pytest.param(*PLACES[3], marks=pytest.mark.slow)]
each_place = pytest.mark.parametrize(("exchange", "place"), MARKED)


@pytest.fixture
def ranks(request: pytest.FixtureRequest, place: str) -> Ranks:
    """Two ranks, on processor cores or on simulated GPUs."""
    return request.getfixturevalue(place)


# --- learning, in chunks of any size ---------------------------------------------------------


def learned(exchange: str, chunk: int | str, num_steps: int) -> tuple[str, list[Any], str]:
    """Train with Adam, and one process on the samples of all; return bits, and what was chosen."""

    def make() -> nn.Module:
        layers = nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)
        return nn.Sequential(*layers, nn.Tanh(), nn.Linear(8, 1))

    def loss(model: nn.Module, samples: Tensor) -> Tensor:
        return (model(samples) - samples.sin().sum(1, keepdim=True)).square().mean()

    module, oracle = build(make)
    parallel = parallel_of(module, exchange, chunk=chunk)
    optimizers = [torch.optim.Adam(one.parameters(), lr=0.01) for one in (parallel, oracle)]
    for step in range(num_steps):
        samples = [batch(rank, step, dtype=torch.float32) for rank in range(dist.get_world_size())]
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss(parallel, samples[dist.get_rank()]).backward()
        loss(oracle, torch.cat(samples)).backward()
        for optimizer in optimizers:
            optimizer.step()
    chosen = [[trial.chunk for trial in parallel.trials], parallel.statistics().exchange]
    return check(parallel, oracle, 1e-5), chosen, parallel.why


@pytest.mark.parametrize(
    ("place", "num_steps"), [("pair", 50), pytest.param("pair_on_gpus", 10, marks=pytest.mark.slow)]
)
def test_neither_time_nor_chunks_change_a_bit(ranks: Ranks, num_steps: int):
    found = {
        chunk: ranks(learned, "host", chunk, num_steps, deadline_s=120)
        for chunk in (1, 2, 100, "auto")
    }
    assert len({own for ranks in found.values() for own, _, _ in ranks}) == 1
    (_, (tried, exchange), why), (_, _, others) = found["auto"]
    assert (exchange, why) == ("host", others)
    assert len(set(tried)) == len(tried) >= 1


def test_all_ranks_choose_the_same_exchange(pair: Ranks):
    (bits, (_, exchange), why), second = pair(learned, "auto", "auto", 50)
    assert (bits, exchange, why) == (second[0], second[1][1], second[2])
    assert why.startswith(f"{exchange}: ")
    # A network of four layers; the figure of host is that of the chunks it was measured with.
    assert re.search(r"host [\d.e+]+ ms in chunks of [1-4] ", why)


def losses_on_digits(exchange: str) -> list[float]:
    """The losses of two epochs, each step on 32 samples of every rank."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    parallel = parallel_of(module, exchange)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9)
    training, losses = load("digits").train, []
    order = torch.randperm(len(training), generator=torch.Generator().manual_seed(3)).tolist()
    for start in range(32 * dist.get_rank(), 2 * len(order), 32 * dist.get_world_size()):
        inputs, targets = training.__getitems__(
            [order[(start + i) % len(order)] for i in range(32)]
        )
        optimizer.zero_grad()
        loss = F.cross_entropy(parallel(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_host_and_tree_have_one_loss_curve_on_the_digits(pair: Ranks):
    found = {exchange: pair(losses_on_digits, exchange) for exchange in EXCHANGES}
    assert found["host"] == found["tree"]
    for one, other in zip(found["host"], found["allreduce"], strict=True):
        assert one == pytest.approx(other, rel=1e-4)
        assert sum(one[-10:]) < 0.2 * sum(one[:10])


# --- backward passes that fail on some rank, and a user who goes on --------------------------


class OwnError(Exception):
    """The user's own error."""


class _Raise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        raise OwnError


class Fragile(Net):
    """A net whose backward pass fails where its order says "!"."""

    def forward(self, x: Tensor, order: str = "abc") -> Tensor:
        for name in order:
            x = _Raise.apply(x) if name == "!" else torch.tanh(getattr(self, name)(x))
        return x


def goes_on(exchange: str, fails: list[tuple[int, int]], where: str) -> list[tuple[int, str]]:
    """Train where the passes of (rank, step) fail; return the steps that were left out, and why."""
    module, oracle = build(Fragile)
    parallel = parallel_of(module, exchange, deadline_s=2.0)
    optimizers, caught = (sgd(parallel), sgd(oracle)), []
    orders = dict.fromkeys(fails, where)
    for step in range(6):
        for optimizer in optimizers:
            optimizer.zero_grad()
        order = orders.get((dist.get_rank(), step), "abc")
        inputs = batch(dist.get_rank(), step).requires_grad_()
        try:
            parallel(inputs, order).square().mean().backward()
        except (OwnError, StepDiscarded) as error:
            caught.append((step, type(error).__name__))
            continue
        mean(square, oracle, step).backward()
        for optimizer in optimizers:
            optimizer.step()
    check(parallel, oracle)
    return caught


FAILURES = {
    "in the middle": ([(1, 2)], "ab!c"),
    "before any gradient": ([(1, 2)], "abc!"),
    "after all gradients": ([(1, 2)], "!abc"),
    "in the first step": ([(1, 0)], "ab!c"),
    "in the first step, on rank 0": ([(0, 0)], "ab!c"),
    "on all ranks": ([(0, 2), (1, 2)], "ab!c"),
    "on all ranks in the first step": ([(0, 0), (1, 0)], "ab!c"),
    "by turns": ([(1, 1), (0, 2), (1, 3), (0, 4)], "ab!c"),
    "twice on one rank": ([(0, 2), (0, 3)], "ab!c"),
}


def failures_of_each_place() -> list[object]:
    """Without cases in which torch's own waits in vain, and of simulated GPUs: these are slow."""
    return [
        pytest.param(*place, name, marks=[] if is_quick else pytest.mark.slow)
        for place in PLACES
        for name in FAILURES
        for is_quick in [name == "in the middle" or place in PLACES[1:3]]
    ]


@pytest.mark.parametrize(("exchange", "place", "name"), failures_of_each_place())
def test_a_step_that_fails_anywhere_is_left_out_everywhere_or_refused(
    ranks: Ranks, exchange: str, name: str
):
    """A tree of ranks cannot take a step back but the first; torch wants every pass finished."""
    fails, where = FAILURES[name]
    found = ranks(goes_on, exchange, fails, where, timeout_s=4.0, errors=True)
    if exchange == "allreduce" or (exchange == "tree" and max(step for _, step in fails) > 0):
        refused = [one for one in found if isinstance(one, Failure)]
        kind, field = ("InvalidInput", "exchange") if exchange == "tree" else ("RuntimeError", None)
        assert any(kind in one.kinds and one.fields.get("field") == field for one in refused)
        return
    failing = dict.fromkeys(fails, "OwnError")
    steps = sorted({step for _, step in fails})
    caught = [
        [(step, failing.get((rank, step), "StepDiscarded")) for step in steps] for rank in (0, 1)
    ]
    assert found == caught


def fails_in_no_sync(exchange: str) -> str:
    """What was accumulated before is kept, and the user decides."""
    module, _ = build(Fragile)
    parallel = parallel_of(module, exchange, deadline_s=2.0)
    optimizer = sgd(parallel)
    for step in range(3):
        optimizer.zero_grad()
        with parallel.no_sync():
            order = "ab!c" if (dist.get_rank(), step) == (1, 1) else "abc"
            try:
                parallel(batch(dist.get_rank(), 50 + step), order).square().mean().backward()
            except OwnError:
                parallel.zero_grad()
        parallel(batch(dist.get_rank(), step)).square().mean().backward()
        optimizer.step()
    return check(parallel, parallel)


def fails_in_forward(exchange: str) -> str:
    """A forward pass that fails on one rank and is done again leaves nothing behind."""
    module, oracle = build(Net)
    parallel = parallel_of(module, exchange)
    for step in range(4):
        if (dist.get_rank(), step) == (1, 2):
            with pytest.raises(RuntimeError, match="shape"):
                parallel(batch(dist.get_rank(), step, 4, 5))
        train(parallel, oracle, [step])
    return check(parallel, oracle)


def a_nan_on_one_rank(exchange: str) -> None:
    module, _ = build(Net)
    parallel = parallel_of(module, exchange)
    optimizer = sgd(parallel)
    for step in range(3):
        optimizer.zero_grad()
        factor = float("nan") if (dist.get_rank(), step) == (1, 1) else 1.0
        (square(parallel, dist.get_rank(), step) * factor).backward()
        optimizer.step()
    assert all(parameter.isnan().all() for parameter in parallel.parameters())


def an_overflow_on_one_rank(exchange: str) -> None:
    """All ranks leave the step out in which one overflows, and scale less from then on."""
    module, oracle = build(Net)
    parallel = parallel_of(module, exchange, deadline_s=2.0)
    optimizers, scaler = (sgd(parallel), sgd(oracle)), torch.amp.GradScaler("cpu", 1024.0)
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        factor = float("inf") if (dist.get_rank(), step) == (1, 1) else 1.0
        (scaler.scale(square(parallel, dist.get_rank(), step)) * factor).backward()
        before = bits(parallel)
        scaler.step(optimizers[0])
        scaler.update()
        assert scaler.get_scale() == (1024.0 if step == 0 else 512.0)
        assert (before == bits(parallel)) == (step == 1)
        if step != 1:
            mean(square, oracle, step).backward()
            optimizers[1].step()
    check(parallel, oracle)


def closed(exchange: str) -> None:
    """After close a rank trains alone, and keeps its last gradients."""
    module, oracle = build(Net)
    parallel = parallel_of(module, exchange)
    train(parallel, oracle, range(3))
    before = [parameter.grad.clone() for parameter in parallel.parameters()]
    parallel.close()
    parallel.close()
    for one, parameter in zip(before, parallel.parameters(), strict=True):
        assert torch.equal(one, parameter.grad)
    for model in parallel, oracle:
        model.zero_grad()
        square(model, dist.get_rank(), 9).backward()
    for one, two in zip(parallel.parameters(), oracle.parameters(), strict=True):
        assert distance(one.grad, two.grad) <= 1e-12


def two_models(exchange: str) -> None:
    """As in adversarial training: each has its own loss, optimizer and steps."""
    pairs = [(parallel_of(module, exchange), oracle) for module, oracle in (build(Net), build(Net))]
    for step in range(6):
        train(*pairs[step % 2], [step])
    for model, oracle in pairs:
        check(model, oracle)


def unfrozen_when_another_exchange_begins(exchange: str) -> None:
    """The next exchange was prepared for the parameters that were trainable before."""
    module, oracle = build(Net)
    for model in module, oracle:
        model.b.requires_grad_(False)
    parallel = parallel_of(module, "auto", chunk="auto")
    optimizers = sgd(parallel), sgd(oracle)
    for step in range(16):
        for model, optimizer in zip((module, oracle), optimizers, strict=True):
            model.b.requires_grad_(step >= 13)  # after the steps in which the first one is tried
            optimizer.zero_grad()
        square(parallel, dist.get_rank(), step).backward()
        mean(square, oracle, step).backward()
        for optimizer in optimizers:
            optimizer.step()
    check(parallel, oracle)


def run_by_one_rank_alone_after_unfreezing(exchange: str) -> None:
    """Torch's new reducer would meet the other ranks in the next forward pass, which is alone."""
    module, oracle = build(Net)
    for model in module, oracle:
        model.b.requires_grad_(False)
    parallel = parallel_of(module, exchange, deadline_s=2.0)
    optimizers = sgd(parallel), sgd(oracle)
    for step in range(5):
        for model, optimizer in zip((module, oracle), optimizers, strict=True):
            model.b.requires_grad_(step >= 2)
            optimizer.zero_grad()
        if step == 3:
            if dist.get_rank() == 0:
                parallel(batch(0, 99))
            dist.barrier()
        square(parallel, dist.get_rank(), step).backward()
        mean(square, oracle, step).backward()
        for optimizer in optimizers:
            optimizer.step()
    check(parallel, oracle)


@each_place
@pytest.mark.parametrize(
    "program",
    [
        fails_in_no_sync,
        fails_in_forward,
        a_nan_on_one_rank,
        an_overflow_on_one_rank,
        closed,
        two_models,
        unfrozen_when_another_exchange_begins,
        run_by_one_rank_alone_after_unfreezing,
    ],
)
def test_a_program_does_what_one_process_does(
    ranks: Ranks, program: Callable[[str], None], exchange: str
):
    ranks(program, exchange)


# --- what is refused -------------------------------------------------------------------------


def differing(what: str) -> None:
    """Make a module parallel that differs between ranks."""
    rank = dist.get_rank()
    module: nn.Module = Net()
    if what == "order":
        module = Net(layers="bac" if rank else "abc")
    elif what == "shape":
        module = nn.Linear(6, 3 + rank)
    elif what == "number":
        module = nn.Linear(6, 3, bias=rank == 0)
    elif what == "type":
        module = nn.Linear(6, 3).to(torch.float64 if rank else torch.float32)
    elif what == "strides":
        module = nn.Conv2d(3, 4, 2)
        module = module.to(memory_format=torch.channels_last) if rank else module
    elif what == "frozen":
        module.c = nn.Linear(6, 6 + rank).requires_grad_(False)
    elif what == "buffer":
        module.register_buffer("extra", torch.zeros(3 + rank))
    parallel_of(module, "host", deadline_s=2.0)


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("order", "'b.weight'"),
        ("shape", "[4, 6]"),
        ("number", "has 1"),
        ("type", "float64"),
        ("strides", "[12, 1, 6, 3]"),
        ("frozen", "[7, 6]"),
        ("buffer", "'extra' of shape [4]"),
    ],
)
def test_modules_that_differ_between_ranks_are_refused_on_all(pair: Ranks, what: str, named: str):
    for failure in pair(differing, what, errors=True):
        assert (failure.kind, failure.fields["field"]) == ("ModelsDiffer", "module")
        assert named in failure.fields["problem"]


def _double(parameter: Tensor) -> None:
    parameter.grad.mul_(2)


def _update(parameter: Tensor) -> None:
    with torch.no_grad():
        parameter -= 0.1 * parameter.grad
    parameter.grad = None


def hooked(exchange: str, name: str, early: bool) -> str:
    """Train with a user's hook on a gradient that is registered before ours, or after."""
    hook = {"double": _double, "update": _update}[name]
    module, oracle = build(Net)
    if early:
        for model in module, oracle:
            model.b.weight.register_post_accumulate_grad_hook(hook)
    parallel = parallel_of(module, exchange, deadline_s=2.0)
    train(parallel, oracle, range(2))
    if not early:
        for model in module, oracle:
            model.b.weight.register_post_accumulate_grad_hook(hook)
    train(parallel, oracle, range(2, 4))
    return check(parallel, oracle)


@pytest.mark.parametrize(("exchange", "place"), MARKED[1:])
@pytest.mark.parametrize(
    ("hook", "early"), [("double", True), ("double", False), ("update", True), ("update", False)]
)
def test_a_hook_on_a_gradient_counts_or_is_refused(ranks: Ranks, exchange, hook, early):
    """After it was sent, a gradient must not change any more; a tree sends all at the end."""
    counts = hook == "double" and (early or exchange == "tree")
    for failure in ranks(hooked, exchange, hook, early, errors=not counts):
        if not counts:
            assert (failure.kind, failure.fields["field"]) == (
                "InvalidInput",
                "parameter 'b.weight'",
            )


def order_differs(exchange: str) -> None:
    """Two models that the ranks run in another order."""
    models = {name: parallel_of(Net(), exchange, deadline_s=2.0) for name in "ab"}
    for step in range(4):
        order = "ba" if dist.get_rank() else "ab"
        outputs = {name: models[name](batch(dist.get_rank(), step)) for name in order}
        (outputs["a"] * outputs["b"]).mean().backward()


def swaps_tensors(exchange: str) -> None:
    """The parameters stay, but all that torch knows of them is another tensor's: hooks, too."""
    module, oracle = build(Net)
    parallel = parallel_of(module, exchange)
    train(parallel, oracle, range(2))
    saved = copy.deepcopy(parallel.state_dict())
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        parallel.load_state_dict(saved)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    train(parallel, oracle, range(2, 5))


@pytest.mark.parametrize("exchange", ["tree", "host"])
@pytest.mark.parametrize("program", [order_differs, swaps_tensors])
def test_what_would_give_wrong_gradients_is_refused_on_all_ranks(pair: Ranks, exchange, program):
    kinds = {"InvalidInput"} if program is order_differs else {"InvalidInput", "RuntimeError"}
    assert {one.kind for one in pair(program, exchange, errors=True)} <= kinds


@pytest.mark.parametrize(
    "setting", [{"exchange": "magic"}, {"codec": "fp8"}, *({"chunk": c} for c in (0, 1.5, "all"))]
)
def test_unknown_settings_are_refused(setting: dict[str, Any]):
    ((field, _),) = setting.items()
    with refused(field):
        DataParallel(nn.Linear(3, 2), **setting)


# --- what it tells ---------------------------------------------------------------------------


def told(exchange: str) -> dict[str, Any]:
    module, oracle = build(Net)
    parallel = parallel_of(module, exchange)
    train(parallel, oracle, range(5))
    timeline = parallel.timeline()
    return {
        "statistics": vars(parallel.statistics()),
        "total": 5 * sum(parameter.nbytes for parameter in parallel.parameters()),
        "origin": timeline.origin.value,
        "start": min(span.start_s for span in timeline.spans),
        "backwards": sum(span.end_s < span.start_s for span in timeline.spans),
        "kinds": {str(span.kind.value) for span in timeline.spans},
        "steps": timeline.num_steps(),
        "why": parallel.why,
    }


@pytest.mark.parametrize(
    ("exchange", "kinds"),
    [
        ("allreduce", {"forward", "step"}),
        ("tree", {"forward", "backward", "send", "step"}),
        ("host", {"forward", "backward", "d2h", "reduce", "step"}),
    ],
)
def test_statistics_and_timeline_say_what_was_done(pair: Ranks, exchange: str, kinds: set[str]):
    found = pair(told, exchange)
    for outcome in found:
        statistics, total = outcome["statistics"], outcome["total"]
        assert (statistics["exchange"], statistics["num_steps"]) == (exchange, 5)
        assert outcome["why"].startswith(f"{exchange}: ")
        sent, received = statistics["bytes_sent"], statistics["bytes_received"]
        # The tree's gradients have a flag of their type for each parameter.
        margin = 5 * 8 * 6 if exchange == "tree" else 0
        assert total <= min(sent, received) <= max(sent, received) <= total + margin
        assert statistics["chunk"] == (1 if exchange == "host" else None)
        if exchange != "allreduce":
            assert statistics["hidden_s"] >= 0
            assert statistics["exposed_s"] > 0
        assert (outcome["origin"], outcome["start"], outcome["backwards"]) == ("measured", 0.0, 0)
        assert kinds <= outcome["kinds"]
    assert found[0]["steps"] == 5


@pytest.mark.parametrize("exchange", ["auto", *EXCHANGES])
def test_a_process_alone_trains_as_without(exchange: str):
    torch.manual_seed(0)
    module = nn.Linear(3, 2)
    parallel = DataParallel(module, exchange=exchange)
    inputs = torch.ones(4, 3)
    with parallel.no_sync():
        parallel(inputs).sum().backward()
    assert torch.equal(module.weight.grad, torch.full((2, 3), 4.0))
    torch.optim.SGD(parallel.parameters(), lr=0.1).step()
    parallel(inputs)
    assert list(parallel.state_dict()) == ["module.weight", "module.bias"]
    statistics = parallel.statistics()
    assert (statistics.num_steps, statistics.bytes_sent) == (0, 0)
    assert {str(span.kind.value) for span in parallel.timeline().spans} == {"forward", "step"}
    parallel.close()


class Wide(nn.Module):
    """More bytes of gradients than a container's /dev/shm often has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(18 * 2**20))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def trains_with_a_small_dev_shm() -> None:
    import ctypes

    assert ctypes.CDLL(None).unshare(0x00020000) == 0  # CLONE_NEWNS
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", "/dev/shm"]
    subprocess.run(mount, check=True)
    module = Wide()
    parallel = parallel_of(module, "host")
    optimizer = torch.optim.SGD(parallel.parameters(), lr=1.0)
    for _ in range(3):
        optimizer.zero_grad()
        parallel(torch.tensor(1.0 + dist.get_rank())).backward()
        optimizer.step()
    assert parallel.statistics().bytes_sent == 3 * 72 * 2**20
    assert torch.equal(module.weight, torch.full_like(module.weight, -4.5))


def test_gradients_need_no_space_in_dev_shm():
    """A container gives /dev/shm 64 MiB; a full one would end in a SIGBUS."""
    try:
        subprocess.run(["unshare", "-m", "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("a mount namespace needs root")
    ranks = Ranks(2)  # of their own, as they stay in the namespace
    try:
        ranks(trains_with_a_small_dev_shm)
    finally:
        ranks.close()
