"""Wheel with more workers than devices, and the sentence about a hub that limits (3.4.1)."""

import pytest

from boxes import box, link
from findings import numbers
from paceline.core.workload import Cost, Layer, Parameter, Workload
from paceline.planner import Forecast, forecast_one, search
from paceline.records.built_in import recorded
from paceline.records.machine_file import find_machine
from paceline.strategies import find_strategy
from paceline.strategies.wheel.config import Wheel
from paceline.strategies.wheel.routes import place
from wheels import BODY, HEAD, SAMPLES, model

MACHINE = find_machine("k40-gigabit")  # four devices, so a hub and three for bodies
FLOPS_PER_S = 1.31e12
WHEEL = find_strategy("wheel")
WHOLE = BODY + HEAD  # bytes of all gradients


def alexnet(samples: int) -> Workload:
    found = recorded("alexnet", samples)
    assert found is not None
    return found


def two_layers(samples: int, head_share: float, sample_nbytes: int = 64) -> Workload:
    """Return a body of a second on each device, and a head of that share of it."""

    def layer(name: str, shape: tuple[int, ...], seconds: float) -> Layer:
        flops, parameters = seconds / 3 * FLOPS_PER_S, (Parameter(f"{name}.weight", shape),)
        return Layer(name, parameters, sample_nbytes * samples, Cost(flops), Cost(2 * flops))

    layers = layer("body", (4, 4, 3, 3), 1.0), layer("head", (16, 16), head_share)
    return Workload("two", samples, layers, (1, 0), 64 * samples)


def test_a_plan_has_as_many_workers_as_alternate_on_the_devices() -> None:
    allreduce = find_strategy("allreduce")
    ranking = search(alexnet, MACHINE, [WHEEL, allreduce], 6 * 256, workers=6)
    (found,) = [one for one in ranking if one.codec is None]
    assert (found.strategy, found.workers) == ("wheel", 6)
    assert {(one.strategy, one.workers) for one in ranking.refused} == {("allreduce", 6)}
    # Six workers of four devices are not compared with six devices.
    own = forecast_one(alexnet, MACHINE, allreduce, allreduce.config(workers=1), 256)
    assert found.alone_samples_per_s / 4 == pytest.approx(own.samples_per_s, rel=1e-6)


def limits(found: Forecast) -> list[float]:
    """Return the figures of the note about the hub that limits, if there is one."""
    *notes, _ = found.notes  # the last one says that it is not the same training
    return numbers(notes[0])[-2:] if notes else []


@pytest.mark.parametrize(("head_s", "needed"), [(0.9, 3), (1.0, 4), (1.1, 4)])
def test_the_plan_says_how_many_devices_keep_up_where_heads_take_longer(
    head_s: float, needed: int
) -> None:
    """p k / t is 2.7, 3 and 3.3, of k = 3 and t = 1 s, and here is one device with heads.

    At 3 the calls decide, of 5 us each. An answer has one that waits for the GPU, and its update
    four, two for each of two tensors; a body's step has two that wait, and one that loads: p k / t
    is 3 (1 s + 25 us) / (1 s + 15 us), and three devices are too few.
    """
    config = Wheel(workers=6, head="head")
    found = forecast_one(lambda n: two_layers(n, head_s), MACHINE, WHEEL, config, 6 * 16)
    times, devices = limits(found)
    assert (times, devices) == (pytest.approx(3 * head_s, abs=0.005), needed)
    assert found.step_s == pytest.approx(6 * head_s, rel=0.02)  # all answers, one after another


def test_the_devices_that_keep_up_are_counted_for_each_hub() -> None:
    """p = 2.4 s, k = 2 and t = 3 s at each of two child hubs: 1.6, so two devices for each."""
    machine = box(*["cpu"] * 7, links=[link("h", "h", 1e15)])
    config = Wheel(workers=8, child_hubs=2)
    found = forecast_one(lambda _: model(head_s=0.8), machine, WHEEL, config, 8 * SAMPLES)
    assert limits(found) == [1.6, 4]


@pytest.mark.parametrize(
    ("head_s", "sample_nbytes", "least_s", "most_s"),
    [
        (0.2, 64, 1.8, 2.2),  # the hub keeps up with two workers on each device
        # The hub waits for the network: 7 s of the link for each message of 16.
        (1.5, 50 * 2**20, 2 * 6 * 1.5, 1e6),
    ],
)
def test_the_plan_does_not_blame_a_hub_that_keeps_up_or_waits(
    head_s: float, sample_nbytes: int, least_s: float, most_s: float
) -> None:
    def work(samples: int) -> Workload:
        return two_layers(samples, head_s, sample_nbytes)

    found = forecast_one(work, MACHINE, WHEEL, Wheel(workers=6, head="head"), 6 * 16)
    assert limits(found) == []
    assert least_s < found.step_s < most_s


@pytest.mark.parametrize(
    ("head_s", "num_devices", "child_hubs"), [(0.8, 5, 2), (0.01, 5, 0), (0.8, 4, 0)]
)
def test_heads_are_placed_on_more_devices_where_that_pays_and_there_are_any(
    head_s: float, num_devices: int, child_hubs: int
) -> None:
    """Of four workers: one hub and two devices, or a root, two child hubs and two devices."""
    machine = box(*["cpu"] * num_devices, links=[link("h", "h", 1e15)])
    ranking = search(lambda _: model(head_s=head_s), machine, [WHEEL], 4 * SAMPLES, workers=4)
    best = next(one for one in ranking if one.codec is None)
    assert best.config.child_hubs == child_hubs
    said = any("child_hubs=2" in note for note in best.notes)
    assert said == bool(child_hubs)


@pytest.mark.parametrize(
    ("mean_s", "child_hubs", "heads", "bodies", "step_s"),
    [
        # A hub's heads take 4.8 s for two workers, whose device 6: means, and they alone, cross.
        (1.0, 2, "aabb", "aabb", 6.0),
        # Eighty seconds there and back, and all heads on one device 9.6.
        (40.0, 0, "aaaa", "aaaa", 4 * 2.4),
    ],
)
def test_heads_are_on_both_hosts_where_means_cross_between_them_in_time(
    mean_s: float, child_hubs: int, heads: str, bodies: str, step_s: float
) -> None:
    """Three devices and two, between which a mean of all gradients takes so long."""
    ways = [link("a", "a", 1e15), link("b", "b", 1e15), link("a", "b", WHOLE / mean_s)]
    machine = box(*["cpu"] * 5, hosts="aaabb", links=ways)
    ranking = search(lambda _: model(head_s=0.8), machine, [WHEEL], 4 * SAMPLES, workers=4)
    best = next(one for one in ranking if (one.codec, one.placement) == (None, "as listed"))
    placed = place(best.machine, best.config)
    assert best.config.child_hubs == child_hubs
    assert [one.host for one in placed.bodies] == [*bodies]
    assert {one.host for one in placed.heads} == set(heads)
    assert best.step_s == pytest.approx(step_s, rel=0.05)
    if child_hubs:
        assert best.link_nbytes["a->b"] == best.link_nbytes["b->a"] == pytest.approx(WHOLE)
