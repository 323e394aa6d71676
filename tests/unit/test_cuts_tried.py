"""Plans and training choose only cuts that the model allows."""

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.data import TensorDataset

import paceline
from nets import Net
from paceline.commands.options import fields_of
from paceline.core.cost import compute_lane
from paceline.core.errors import InvalidInput
from paceline.records.settings import check_options
from paceline.runs.planning import forecast, plan
from paceline.strategies import find_strategy
from paceline.strategies.subbatch import build as of_subbatch
from paceline.strategies.subbatch import head
from paceline.strategies.subbatch.build import describe_recipe
from paceline.strategies.subbatch.build import split as split_model
from paceline.strategies.subbatch.config import SubBatch
from paceline.strategies.wheel import job as of_wheel
from paceline.strategies.wheel.config import Wheel
from paceline.strategies.wheel.split import split
from paceline.training.models.factory import names
from paceline.training.models.halves import traced
from paceline.training.recipes.named import tried_with, workload_of
from refusals import refused


def compute_passed(net: nn.Module, samples: Tensor) -> Tensor:
    hidden = torch.relu(net.wide(torch.relu(net.first(samples)) + samples))
    return net.last(torch.relu(net.narrow(hidden)) + samples[:, :16])


def passed(compute: Callable[..., Tensor] = compute_passed) -> nn.Module:
    """The input bypasses `wide` and `narrow`, so only a cut before `last` sends a single tensor."""
    sizes = {"first": (32, 32), "wide": (32, 256), "narrow": (256, 16), "last": (16, 100)}
    return Net(compute, **{name: nn.Linear(*size) for name, size in sizes.items()})


def normalised() -> nn.Module:
    """Return a head with GELU and a LayerNorm without parameters between its layers."""
    plain = nn.LayerNorm(256, elementwise_affine=False)
    body = nn.Linear(32, 16), nn.ReLU()
    return nn.Sequential(*body, nn.Linear(16, 256), nn.GELU(), plain, nn.Linear(256, 10))


def recipe(model: type[nn.Module] | object, inputs: Tensor, num_classes: int) -> paceline.Recipe:
    targets = torch.arange(len(inputs)) % num_classes
    return paceline.Recipe(model=model, train=TensorDataset(inputs, targets), loss=F.cross_entropy)


PASSED = recipe(passed, torch.randn(8, 32), 100)
NORMALISED = recipe(normalised, torch.randn(8, 32), 10)


def test_subbatch_splits_only_the_layers_after_an_unsplittable_one() -> None:
    found, _ = describe_recipe(NORMALISED, 8)
    assert [one.name for one in head.cut(found, None, 2).head.layers] == ["2", "5"]
    config = SubBatch(workers=2)
    found = tried_with(NORMALISED, lambda m, x: of_subbatch.with_possible_cut(m, x, found, config))
    group = SimpleNamespace(rank=0, device=torch.device("cpu"))
    made = split_model(normalised, found, config, group, 0, NORMALISED.example(1))
    assert list(made.shardings) == ["5"]


def test_a_plan_has_the_cut_of_training() -> None:
    """Wheel cuts before the next best layer if the best one cannot begin a head."""
    assert split(workload_of(PASSED, 8), Wheel()).head.layers[0].name == "wide"
    spans = forecast(PASSED, "k40-gigabit", "wheel", workers=2, batch_size=16).timeline.spans
    computed = {one.part for one in spans if one.on[0] == compute_lane("gpu0")}  # gpu0 is the hub
    assert computed == {"last", ""}
    spans = forecast(PASSED, "k40-gigabit", "subbatch", workers=2, batch_size=16).timeline.spans
    gathered = {one.part.partition(":")[0] for one in spans if ":" in one.part}
    assert gathered == {"last"}


@pytest.mark.parametrize(
    ("of", "strategy", "named", "would_do"),
    [(PASSED, "wheel", "wide", "last"), (NORMALISED, "subbatch", 2, 5)],
)
def test_plans_refuse_an_impossible_cut_and_name_a_possible_one(
    of: paceline.Recipe, strategy: str, named: object, would_do: object
) -> None:
    asked = {"strategy": strategy, "options": {"head": named}, "workers": 2}
    with refused("head") as caught:
        forecast(of, "k40-gigabit", **asked)
    assert f"head={would_do}" in str(caught.value)
    ranking = plan(of, "k40-gigabit", **asked)
    assert not ranking.forecasts
    assert f"head={would_do}" in ranking.refused[0].why
    assert forecast(of, "k40-gigabit", **asked | {"options": {"head": would_do}})


def test_a_model_without_a_head_is_not_built_to_be_tried() -> None:
    with_values = []

    def build() -> nn.Module:
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten())
        with_values.append(not model[0].weight.is_meta)
        return model

    images = recipe(build, torch.randn(8, 1, 8, 8), 10)
    ranking = plan(images, "k40-gigabit", workers=2, strategy=["wheel", "subbatch"])
    assert not ranking.forecasts
    assert not any(with_values)


def test_planning_leaves_a_users_module_as_it_is() -> None:
    calls = []

    def compute(net: nn.Module, samples: Tensor) -> Tensor:
        calls.append(isinstance(samples, fx.Proxy) or samples.is_meta)
        return compute_passed(net, samples)

    model = passed(compute).eval()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    state = torch.get_rng_state()
    plan(model, "k40-gigabit", input_shape=(32,), workers=2, strategy=["wheel", "subbatch"])
    assert all(calls), "it ran with values"
    assert not model.training
    assert torch.equal(state, torch.get_rng_state())
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "lenet5" else pytest.mark.slow) for name in names()],
)
def test_the_usual_cuts_of_built_in_models_are_possible(name: str) -> None:
    own = workload_of(name, 8)
    for config, trial in ((Wheel(), of_wheel), (SubBatch(), of_subbatch)):
        try:
            split(own, config) if trial is of_wheel else head.cut(own, None, 2)
        except InvalidInput:
            continue  # not planned either
        found = tried_with(name, lambda m, x, c=config, t=trial: t.with_possible_cut(m, x, own, c))
        assert not found.refused_cuts


@pytest.mark.parametrize("strategy", ["wheel", "subbatch"])
def test_a_layer_of_sequential_is_named_by_its_number(strategy: str) -> None:
    known = find_strategy(strategy)
    assert check_options(known, fields_of(["head=7"], "options"), 2).head == "7"
    assert check_options(known, fields_of(['head="7.10"'], "options"), 2).head == "7.10"
    with refused("head"):  # 7.10 and 7.1 are the same number
        check_options(known, fields_of(["head=7.10"], "options"), 2)


NUM_THREADS, NUM_TRACES = 3, 30


def nested() -> nn.Module:
    inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    return Net(lambda net, rows: net.inner(rows) + torch.zeros(rows.shape[0], 1), inner=inner)


def graph() -> list[str]:
    model = nested()
    return [str(node) for node in traced(model, torch.ones(2, 4), model.inner[2])]


def test_threads_trace_at_once_while_another_computes() -> None:
    expected_graph, model, rows, ended = graph(), nested(), torch.ones(2, 4), threading.Event()
    expected, own_call, own_zeros = model(rows), nn.Module.__call__, torch.zeros

    def compute() -> None:
        while not ended.is_set():
            assert torch.equal(model(rows), expected)

    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)  # switch threads a thousand times as often as usual
    try:
        with ThreadPoolExecutor(NUM_THREADS + 1) as pool:
            computing = pool.submit(compute)
            graphs = [pool.submit(graph) for _ in range(NUM_THREADS * NUM_TRACES)]
            wait(graphs)
            ended.set()
    finally:
        sys.setswitchinterval(before)
    computing.result()
    assert [one.result() for one in graphs] == [expected_graph] * len(graphs)
    assert (nn.Module.__call__, torch.zeros) == (own_call, own_zeros)
