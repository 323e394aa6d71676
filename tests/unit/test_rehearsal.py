"""Rehearsals, and the workloads of recipes in plans, rehearsals and profiles."""

import resource
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import own_recipes
import paceline
from absent_ranks import group_of
from command_line import MACHINE
from paceline.core.cost import Rate, Totals
from paceline.core.link_fit import ExchangeSample
from paceline.core.plan import Kind, PriceKey
from paceline.exchange.profile import Profile
from paceline.exchange.replicas import ReplicaRunner
from paceline.exchange.session import Progress, TrainingSession
from paceline.exchange.setup import TrainingSetup, setup_of
from paceline.measure.this_machine import this_machine
from paceline.records.machine_file import find_device
from paceline.records.profile import ProfileSettings
from paceline.records.settings import configuration, strategy_of, validated_rehearsal
from paceline.runs.forecasts import forecast_with
from paceline.runs.session import paced_device
from paceline.studies.profile.largest_batch import Attempt, try_step
from paceline.studies.profile.profiled_steps import subject_of
from paceline.training.models import describe
from paceline.training.models.paced import QUEUED_S, PacedModel
from paceline.training.recipes.named import (
    given,
    own_recipe,
    recipe_of,
    takes_any_data,
    workload_of,
)
from paceline.training.recipes.recipe import built
from refusals import refused

MACHINES = Path(__file__).parents[2] / "machines"
FORWARD_S, BACKWARD_S, UPDATE_S = 0.006, 0.012, 0.003
LAYER_NBYTES = 4 * (64 * 64 + 64)
LATENCY_S = 1e-4


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("p100", "power8-p100/gpu0"),
        ("P100", "power8-p100/gpu0"),
        ("gpu", "8xh100/gpu0"),
        ("gpu2", "8xh100/gpu2"),
        ("Power8-P100/GPU3", "power8-p100/gpu3"),
        ("epyc", "two-core-epyc/cpu0"),
        (f"{MACHINES / 'two-core-epyc.toml'}:cpu1", "two-core-epyc/cpu1"),
    ],
)
def test_a_device_is_found_by_what_people_call_it(name, label, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the files that come with Paceline are found from anywhere
    assert find_device(name).label == label


def test_machine_files_of_the_user_come_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "machines").mkdir()
    text = (MACHINES / "power8-p100.toml").read_text()
    own = tmp_path / "machines" / "zoo.toml"
    own.write_text(text.replace('name = "power8-p100"', 'name = "my-p100"'))
    assert find_device("p100").label == "my-p100/gpu0"
    own.write_text("name = 3")
    with refused("machines/zoo.toml"):
        find_device("p100")


@pytest.mark.parametrize("name", ["", "k80", "gpu99", ":"])
def test_an_unknown_device_is_refused(name):
    with refused("device"):
        find_device(name)


def session(**values: object) -> TrainingSession:
    """Create the session of the first of two ranks of a rehearsal."""
    settings = validated_rehearsal(values)
    known = strategy_of(settings), configuration(settings)
    device = paced_device(settings)
    return TrainingSession(settings, *known, "run", group_of(0, 2), Progress(), device)


def paced(strategy: str, **settings: object) -> TrainingSession:
    """Create a session of two paced workers with three layers of equal size."""
    return session(model="mlp-64-64-64-64", device="p100", strategy=strategy, **settings)


TOTALS = {"forward_ms": 6.0, "backward_ms": 12.0, "update_ms": 3.0}


def test_a_paced_model_has_the_given_totals_or_those_of_the_device():
    known = setup_of(paced("host")).times
    assert known is not None
    mixed = setup_of(paced("host", backward_ms=12.0))
    assert isinstance(mixed.model, PacedModel)
    assert mixed.times is not None
    sums = Totals(sum(mixed.times.forward_s), sum(mixed.times.backward_s), mixed.times.update_s)
    assert sums == pytest.approx((sum(known.forward_s), BACKWARD_S, known.update_s))


def profiled(
    one: TrainingSession, setup: TrainingSetup, exchange: Sequence[ExchangeSample]
) -> Profile:
    """Create a profile in which each layer takes exactly its paced time."""
    times = setup.times
    assert times is not None
    machine = this_machine(one.group, [Rate(1e12, 1e12)] * 2)
    kinds = ((Kind.FORWARD, times.forward_s), (Kind.BACKWARD, times.backward_s))
    parts = {
        (kind, layer.name): seconds
        for kind, column in kinds
        for layer, seconds in zip(setup.workload.layers, column, strict=True)
    }
    parts |= {(Kind.LOAD, ""): 0.0, (Kind.STEP, ""): times.update_s}
    durations = {
        PriceKey(device.name, kind, part): seconds
        for device in machine.devices
        for (kind, part), seconds in parts.items()
    }
    return Profile(machine, durations, {one.strategy.name: tuple(exchange)})


def predicted_s(strategy: str, seconds_per_byte: float, **settings: object) -> float:
    """Predict a step whose exchanges take LATENCY_S and `seconds_per_byte`."""
    exchange = [ExchangeSample(n, LATENCY_S + n * seconds_per_byte) for n in (1000, 2**20)]
    one = paced(strategy, **(TOTALS | settings))
    runner = ReplicaRunner(one, one.strategy.runner().replica)
    runner.profiled = profiled(one, runner.setup, exchange)
    return forecast_with(one, runner, one.strategy, one.config).step_s


# For each byte of gradients 2 ranks move 7, 4 of them when both copy at once (read and write).
COPY_NBYTES = LAYER_NBYTES * 4 / 7


@pytest.mark.parametrize(
    ("strategy", "seconds_per_byte", "nbytes"),
    [
        # The next layer hides each copy and sum; only those of the last layer are exposed.
        ("host", 1e-8, LAYER_NBYTES),
        # A copy that takes longer than the next layer delays it.
        ("host", 1e-5, 2 * COPY_NBYTES + LAYER_NBYTES),
        ("allreduce", 1e-8, 3 * LAYER_NBYTES),  # the only bucket is exposed
    ],
)
def test_the_exposed_part_of_an_exchange(strategy, seconds_per_byte, nbytes):
    exchange_s = LATENCY_S + nbytes * seconds_per_byte
    step_s = predicted_s(strategy, seconds_per_byte)
    assert step_s == pytest.approx(FORWARD_S + BACKWARD_S + UPDATE_S + exchange_s)


def test_queued_short_layers_make_up_for_a_copy():
    copy_s, backward_s = QUEUED_S / 2, QUEUED_S / 2  # three layers of less than a copy each
    step_s = predicted_s("host", copy_s / COPY_NBYTES, backward_ms=1e3 * backward_s)
    times = setup_of(paced("host", **(TOTALS | {"backward_ms": 1e3 * backward_s}))).times
    assert times is not None
    exchanged_s = times.backward_s[-1] + 2 * copy_s + LATENCY_S + copy_s * 7 / 4
    assert step_s == pytest.approx(FORWARD_S + exchanged_s + UPDATE_S)


def test_another_number_of_workers_than_were_started_is_refused():
    with refused("workers"):
        setup_of(session(model="lenet5", device="p100", workers=3))


@pytest.mark.parametrize("kind", [{"device": "p100"}, {"slowdown": 2}])
def test_a_model_of_the_user_needs_an_input_shape(kind):
    with refused("torch.nn:Identity"):
        setup_of(session(model="torch.nn:Identity", **kind))
    with refused("input_shape"):
        setup_of(session(model="paceline.training.models.networks:LeNet5", **kind))
    shaped = session(
        model="paceline.training.models.networks:LeNet5", input_shape=(1, 32, 32), **kind
    )
    assert setup_of(shaped).workload.num_parameters == 61_706


TOKEN_PARAMETERS = 29 * 8 + 8 * 29 + 29


def test_a_recipe_is_described_by_its_data() -> None:
    """`workload_of` describes the model on its first sample; a token has 8 bytes."""
    recipe = own_recipes.tokens()
    found = workload_of(recipe, 5)
    inputs = own_recipes.token_data(1).tensors[0].expand(5, -1)
    expected = describe(own_recipes.TokenModel(), inputs, "the recipe")
    assert found == replace(expected, target_nbytes=5 * 12 * 8)
    assert (found.num_parameters, found.batch_size) == (TOKEN_PARAMETERS, 5)
    assert found.input_nbytes == 5 * 12 * 8


def test_fields_of_a_mapping_are_the_arguments_of_the_model() -> None:
    found = workload_of(own_recipes.fields(), 3)
    assert found.num_parameters == 29 * 8 + (8 + 8) + (8 * 2 + 2)
    assert found.input_nbytes == 3 * (5 * 8 + 4 + 8)


def test_a_model_of_many_gigabytes_is_described_without_allocating_them() -> None:
    side = 2**17  # 64 GiB of parameters
    data = TensorDataset(torch.zeros(2, 4), torch.zeros(2, 4))
    recipe = paceline.Recipe(
        model=lambda: nn.Sequential(nn.Linear(4, side), nn.Linear(side, side), nn.Linear(side, 4)),
        train=data,
        loss=nn.functional.mse_loss,
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert workload_of(recipe, 2).num_parameters == (5 + side + 1) * side + 4 * side + 4
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB


def spread() -> nn.Module:
    """Create a layer, and read its initial values."""
    made = nn.Linear(4, 3)
    made.weight.data /= float(made.weight.abs().max())
    return made


def test_a_model_that_needs_its_values_is_described_with_them() -> None:
    data = TensorDataset(torch.zeros(2, 4), torch.zeros(2, 3))
    recipe = paceline.Recipe(model=spread, train=data, loss=nn.functional.mse_loss)
    before = torch.get_rng_state()
    assert workload_of(recipe, 2).num_parameters == 15
    assert torch.equal(torch.get_rng_state(), before)  # the program's random numbers are unchanged


def test_a_recipe_is_planned_for_as_its_model_would_be() -> None:
    recipe = own_recipes.tokens()
    (one, *_), (other, *_) = (
        paceline.plan(which, MACHINE, batch_size=8, workers=2)
        for which in (recipe, "own_recipes:tokens")
    )
    assert one.step_s == other.step_s
    swept = paceline.sweep(recipe, MACHINE, "bandwidth=1G:10G", batch_size=8)
    assert len(swept.rankings) > 1
    with refused("input_shape"):
        paceline.plan(recipe, MACHINE, input_shape=(12,))


def test_each_given_recipe_has_its_name_while_it_is_given() -> None:
    first, second = own_recipes.tokens(), own_recipes.fields()
    with given(first) as one, given(first) as again, given(second) as other:
        assert (one, again, other) == (
            "given-recipe:TokenModel",
            "given-recipe:TokenModel-2",
            "given-recipe:Fields",
        )
        assert recipe_of(again, None, 0).train is first.train
        assert recipe_of(other, None, 0).name == "the recipe"
        with refused("data"):
            recipe_of(one, "digits", 0)
    with refused(one):
        own_recipe(one)
    with given(own_recipes.tokens(name="My GPT: no. 3")) as named:
        assert named == "given-recipe:My-GPT-no.-3"


def test_a_name_may_be_of_a_recipe_a_factory_or_a_model() -> None:
    assert own_recipe("own_recipes:ready") is not None
    assert own_recipe("own_recipes:tokens") is not None
    assert own_recipe("own_recipes:TokenModel") is None
    assert own_recipe("lenet5") is None
    assert [takes_any_data(name) for name in ("lenet5", "gpt-1m", "own_recipes:tokens")] == [
        *(True, False, False)
    ]


WRONG = {
    "raises": ("own_recipes:raises", "ValueError: there is no third file"),
    "number": ("own_recipes:number", " int"),
    "empty": ("own_recipes:empty", ""),
    "stream": ("own_recipes:stream", "Stream"),
    "vector_loss": ("loss of own_recipes:vector_loss", "float32 1"),
    "unfit_loss": ("loss of own_recipes:unfit_loss", "RuntimeError: "),
    "vector_score": ("score of own_recipes:vector_score", "bool 1x12"),
    "untrained": ("own_recipes:untrained", ""),
    "unmade": ("own_recipes:unmade", "RuntimeError: no such weights"),
    "no_model": ("own_recipes:no_model", " int"),
    "triple": ("train", ""),
}
UNDESCRIBED = ("untrained", "unmade", "no_model", "triple")


@pytest.mark.parametrize("name", WRONG)
def test_invalid_recipes_are_refused(name: str) -> None:
    field, figure = WRONG[name]
    with refused(field) as caught:
        built(recipe_of(f"own_recipes:{name}", None, 0), 0)
    assert figure in str(caught.value)
    if name in UNDESCRIBED:
        with refused(field):
            workload_of(f"own_recipes:{name}", 2)


def rehearsal(**values: object) -> TrainingSetup:
    return setup_of(session(batch_size=8, workers=2, **values))


def test_a_recipe_is_stretched_with_its_own_loss_on_its_first_sample() -> None:
    recipe = own_recipes.tokens()
    setup = rehearsal(model="own_recipes:tokens", slowdown=2)
    share = next(setup.source(0))
    inputs, targets = (one[:1].expand(4, -1) for one in own_recipes.token_data(1).tensors)
    assert torch.equal(share.inputs, inputs)
    assert torch.equal(share.targets, targets)
    loss = setup.learning.forward(setup.model, share)
    assert torch.equal(loss, recipe.loss(setup.model(inputs), targets))


def test_fields_are_parts_of_a_balanced_batch() -> None:
    setup = rehearsal(model="own_recipes:fields", slowdown=(1, 2), balance="auto")
    share = next(setup.source(0))
    assert share.inputs is share.targets or share.inputs.keys() == share.targets.keys()
    assert {len(leaf) for leaf in share.inputs.values()} == {4}
    assert setup.learning.forward(setup.model, share).ndim == 0


@pytest.mark.parametrize(("name", "shape"), [("gpt-1m", (4, 256)), ("lenet5", (4, 1, 32, 32))])
def test_a_built_in_model_is_stretched_on_random_samples_of_its_kind(name, shape) -> None:
    setup = rehearsal(model=name, slowdown=2)
    share = next(setup.source(0))
    assert share.inputs.shape == shape
    assert share.inputs.is_floating_point() == (name == "lenet5")
    assert setup.workload.input_nbytes == share.inputs.nbytes
    assert 0 < float(setup.learning.forward(setup.model, share).detach()) < 20


FLAT = """
from torch import nn

make = lambda: nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))
"""


def test_a_model_whose_outputs_are_no_classes_needs_a_recipe(own_modules) -> None:
    own_modules(own_flat=FLAT)
    with refused("model"):
        rehearsal(model="own_flat:make", slowdown=2, input_shape=(3,))


def profile(**values: object) -> ProfileSettings:
    return ProfileSettings(**{"batch_size": 16} | values)


def test_a_recipe_is_profiled_on_its_own_data() -> None:
    subject = subject_of(profile(model="own_recipes:tokens"), group_of())
    share = next(subject.source(torch.device("cpu")))
    assert share.inputs.shape == share.targets.shape == (16, 12)
    assert len(subject.batches) == 64 // 16
    with refused("data"):
        subject_of(profile(model="own_recipes:tokens", data="digits"), group_of())


def test_a_built_in_token_model_is_profiled_on_text() -> None:
    subject = subject_of(profile(model="gpt-1m", batch_size=2), group_of())
    share = next(subject.source(torch.device("cpu")))
    assert share.inputs.dtype == torch.int64
    assert torch.equal(share.inputs[:, 1:], share.targets[:, :-1])


def test_an_attempt_at_a_large_batch_repeats_the_first_sample(monkeypatch) -> None:
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)  # would limit this process
    attempt = Attempt(
        settings=profile(model="own_recipes:tokens"), batch_size=500, limit_nbytes=2**40
    )
    found = try_step(attempt)  # far more than its 64 samples
    assert found.fits
