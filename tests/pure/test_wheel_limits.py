"""Wheel with more workers than devices, and the sentence about a hub that limits (3.4.1)."""

import re

import pytest

from boxes import box, link
from paceline.core.errors import InvalidInput
from paceline.core.workload import Cost, Layer, Parameter, Workload
from paceline.planner import forecast_one, search
from paceline.records.built_in import recorded
from paceline.records.machine_file import find_machine
from paceline.strategies import find_strategy
from paceline.strategies.wheel.config import Wheel
from wheels import SAMPLES, model

MACHINE = find_machine("k40-gigabit")  # four devices, so a hub and three for bodies
FLOPS_PER_S = 1.31e12
WHEEL = find_strategy("wheel")


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


def test_the_plan_says_when_heads_take_longer_than_bodies() -> None:
    """p = 1 s, k = 3 and t = 1 s: three devices with heads are needed, and here is one."""
    config = Wheel(workers=6, head="head")
    found = forecast_one(lambda n: two_layers(n, 1.0), MACHINE, WHEEL, config, 6 * 16)
    (note,) = found.notes
    (times,) = re.findall(r"gpu0 is what limits: .* ([\d.]+) times as long", note)
    assert float(times) == pytest.approx(3.0, rel=0.02)
    assert "3 devices with heads" in note or "4 devices with heads" in note
    assert found.step_s == pytest.approx(6 * 1.0, rel=0.02)  # all answers, one after another


def test_the_plan_says_nothing_of_a_hub_that_keeps_up() -> None:
    config = Wheel(workers=6, head="head")
    found = forecast_one(lambda n: two_layers(n, 0.2), MACHINE, WHEEL, config, 6 * 16)
    assert found.notes == ()
    assert found.step_s == pytest.approx(2 * 1.0, rel=0.1)  # two workers on each device


def test_the_plan_does_not_blame_a_hub_that_waits_for_the_network() -> None:
    config = Wheel(workers=6, head="head")
    nbytes = 50 * 2**20  # of a sample: 7 s of the link for each message of 16
    found = forecast_one(lambda n: two_layers(n, 1.5, nbytes), MACHINE, WHEEL, config, 6 * 16)
    assert found.step_s > 2 * 6 * 1.5
    assert found.notes == ()


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
