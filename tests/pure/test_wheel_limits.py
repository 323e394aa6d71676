"""Wheel with more workers than devices, and the sentence about a hub that limits (3.4.1)."""

import re

import pytest

from boxes import box, link
from paceline.core.errors import InvalidInput
from paceline.core.machine import Machine
from paceline.core.workload import Cost, Layer, Parameter, Workload
from paceline.planner import Forecast, forecast_one, search
from paceline.records.built_in import recorded
from paceline.records.machine_file import find_machine
from paceline.strategies import find_strategy
from paceline.strategies.wheel.config import Wheel
from paceline.strategies.wheel.routes import DevicePlacement, place
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
        work = Cost(flops=seconds / 3 * FLOPS_PER_S)
        twice = Cost(flops=2 * work.flops)
        return Layer(
            name, (Parameter(f"{name}.weight", shape),), sample_nbytes * samples, work, twice
        )

    layers = layer("body", (4, 4, 3, 3), 1.0), layer("head", (16, 16), head_share)
    return Workload("two", samples, layers, (1, 0), 64 * samples)


def test_a_plan_has_as_many_workers_as_alternate_on_the_devices() -> None:
    ranking = search(alexnet, MACHINE, [WHEEL, find_strategy("allreduce")], 6 * 256, workers=6)
    (found,) = [one for one in ranking if one.codec is None]
    assert (found.strategy, found.workers) == ("wheel", 6)
    (why,) = {one.why for one in ranking.refused}
    assert "allreduce" in {one.strategy for one in ranking.refused}
    assert "6 do not fit" in why
    # Six workers of four devices are not compared with six devices.
    each = found.alone_samples_per_s / 4
    own = forecast_one(alexnet, MACHINE, find_strategy("allreduce"), one_worker(), 256)
    assert each == pytest.approx(own.samples_per_s, rel=1e-6)


def one_worker() -> object:
    return find_strategy("allreduce").config(workers=1)


def test_more_workers_than_lanes_of_all_devices_are_refused() -> None:
    with pytest.raises(InvalidInput, match="at most 6 workers fit"):
        forecast_one(alexnet, MACHINE, WHEEL, Wheel(workers=7), 7 * 256)
    forecast_one(alexnet, MACHINE, WHEEL, Wheel(workers=9, lanes=3), 9 * 256)
    with pytest.raises(InvalidInput, match="allows 1 to 4"):
        forecast_one(
            alexnet, MACHINE, find_strategy("host"), find_strategy("host").config(workers=6), 1536
        )


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
    note, _ = found.notes
    (times,) = re.findall(r"gpu0 is what limits: .* ([\d.]+) times as long", note)
    assert float(times) == pytest.approx(3 * head_s, abs=0.005)
    assert f"; {needed} devices with heads would keep up" in note
    assert found.step_s == pytest.approx(6 * head_s, rel=0.02)  # all answers, one after another


def test_the_devices_that_keep_up_are_counted_for_each_hub() -> None:
    """p = 2.4 s, k = 2 and t = 3 s at each of two child hubs: 1.6, so two devices for each."""
    machine = box(*["cpu"] * 7, links=[link("h", "h", 1e15)])
    config = Wheel(workers=8, child_hubs=2)
    found = forecast_one(lambda _: model(head_s=0.8), machine, WHEEL, config, 8 * SAMPLES)
    note, _ = found.notes
    assert re.match(r"cpu[14] is what limits: .* 1\.60 times as long", note)
    assert "; 4 devices with heads would keep up" in note


def test_the_plan_says_nothing_of_a_hub_that_keeps_up() -> None:
    config = Wheel(workers=6, head="head")
    found = forecast_one(lambda n: two_layers(n, 0.2), MACHINE, WHEEL, config, 6 * 16)
    (note,) = found.notes
    assert note.startswith("not the same training: workers do not wait for each other")
    assert found.step_s == pytest.approx(2 * 1.0, rel=0.1)  # two workers on each device


def test_the_plan_does_not_blame_a_hub_that_waits_for_the_network() -> None:
    config = Wheel(workers=6, head="head")
    nbytes = 50 * 2**20  # of a sample: 7 s of the link for each message of 16
    found = forecast_one(lambda n: two_layers(n, 1.5, nbytes), MACHINE, WHEEL, config, 6 * 16)
    assert found.step_s > 2 * 6 * 1.5
    (note,) = found.notes
    assert note.startswith("not the same training: workers do not wait for each other")


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
    said = [note for note in best.notes if "--set child_hubs=2" in note]
    assert bool(said) == bool(child_hubs)


def two_hosts(mean_s: float) -> Machine:
    """Three devices and two, between which a mean of all gradients takes so long."""
    ways = [link("a", "a", 1e15), link("b", "b", 1e15), link("a", "b", WHOLE / mean_s)]
    return box(*["cpu"] * 5, hosts="aaabb", links=ways)


def best_as_listed(machine: Machine) -> tuple[Forecast, DevicePlacement]:
    """Return the best forecast of four workers on the devices in their order, and its placement."""
    ranking = search(lambda _: model(head_s=0.8), machine, [WHEEL], 4 * SAMPLES, workers=4)
    best = next(one for one in ranking if (one.codec, one.placement) == (None, "as listed"))
    return best, place(best.machine, best.config)


def test_heads_are_on_both_hosts_where_means_cross_between_them_in_time() -> None:
    """A hub's heads take 4.8 s for two workers, whose device 6: means, and they alone, cross."""
    best, placed = best_as_listed(two_hosts(1.0))
    assert best.config.child_hubs == 2
    assert [one.host for one in placed.heads] == [*"aabb"]
    assert [one.host for one in placed.bodies] == [*"aabb"]
    assert best.link_nbytes["a->b"] == best.link_nbytes["b->a"] == pytest.approx(WHOLE)
    assert best.step_s == pytest.approx(6.0, rel=0.05)


def test_heads_stay_on_one_host_where_means_take_longer_than_heads() -> None:
    """Eighty seconds there and back, and all heads on one device 9.6."""
    best, placed = best_as_listed(two_hosts(40.0))
    assert best.config.child_hubs == 0
    assert {one.host for one in (*placed.heads, *placed.bodies)} == {"a"}
    assert best.step_s == pytest.approx(4 * 2.4, rel=0.01)
