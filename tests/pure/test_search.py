"""Which plans are looked at, which are refused, and how many workers are worth using."""

from dataclasses import fields, replace

import pytest

from boxes import box, chain, link
from paceline.core.errors import InvalidInput
from paceline.core.machine import Machine
from paceline.core.strategy import Strategy
from paceline.core.workload import Workload
from paceline.planner import Forecast, Ranking, search
from paceline.planner.search import placements
from paceline.strategies import STRATEGIES, find_exchange

ALLREDUCE = find_exchange("allreduce")
SECONDS = 8.0  # of backward for a batch of 8


def workload(samples: int) -> Workload:
    """One layer: its time goes with the samples, its 4 MB of gradients do not."""
    return replace(chain((SECONDS * samples / 8, 4_000_000)), batch_size=samples)


def ranked(machine: Machine, *strategies: Strategy, workers: int | None = None) -> Ranking:
    return search(workload, machine, strategies or [ALLREDUCE], 8, workers)


def joined(kinds: list[str], nbytes_per_s: float, **facts) -> Machine:
    return box(*kinds, links=[link("h", "h", nbytes_per_s)], **facts)


def test_more_workers_gain_until_the_link_takes_what_they_save():
    # The largest part of 8 samples takes n workers as many seconds, and a ring sends 2 (n - 1) / n
    # of 4 MB for each of them over one link.
    machine = joined(["cpu"] * 4, 4e6)
    found = ranked(machine)
    update_s = found.best_of[1].step_s - SECONDS
    for workers, forecast in found.best_of.items():
        ring_s = 2 * (workers - 1)
        assert forecast.step_s == pytest.approx(-(-8 // workers) + ring_s + update_s)
    assert found.worth == 2  # 4 + 2 s; 3 take 3 + 4, 4 take 2 + 6
    rate = (SECONDS + update_s) / (SECONDS / 2 + 2 + update_s)
    # Less than 13 % and 17 % of their steps, the ranges of both, would have to be apart; of four it
    # is 23 %.
    assert found.workers_sentence == (
        f"2 workers may be worth using, {rate:.2f}x one worker; 4 may lose 25 %"
    )


def test_workers_that_gain_more_than_predictions_err_are_worth_using():
    found = ranked(joined(["cpu"] * 2, 4e7))  # 4 + 0.2 s, for 8
    assert found.workers_sentence.startswith("2 workers are worth using, 1.90x one worker")


def test_one_worker_is_worth_it_where_the_link_is_too_slow():
    found = ranked(joined(["cpu"] * 2, 1e5))
    assert found[0].workers == found.worth == 1
    assert found.workers_sentence.startswith("1 worker is worth using; 2 would lose 9")


@pytest.mark.parametrize(
    ("ring_s", "says"),
    [
        (1.0, "; 4 are predicted to be as fast"),  # 4 + 1 and 2 + 3 s
        (0.97, "; 4 may gain 1 %"),  # 4.97 for 4.91 s
        (1.05, "; 4 may lose 2 %"),  # 5.05 for 5.15 s
    ],
)
def test_what_more_workers_gain_is_within_the_ranges(ring_s, says):
    """It is 2 % at most, or more of them would be worth using."""
    found = ranked(joined(["cpu"] * 4, 8e6 / ring_s))
    assert found.workers_sentence == f"2 workers are worth using, {_times_one(found)}{says}"
    sure = replace(found, forecasts=tuple(map(certain, found.forecasts)))
    assert sure.workers_sentence.endswith(says.replace("may", "would"))


def _times_one(found: Ranking) -> str:
    best = found.best_of
    return f"{best[1].step_s / best[2].step_s:.2f}x one worker"


class Certain(Forecast):
    """A forecast that is never wrong."""

    range_share = 0.0


def certain(one: Forecast) -> Certain:
    return Certain(**{field.name: getattr(one, field.name) for field in fields(one)})


@pytest.mark.parametrize(
    ("nbytes_per_s", "workers", "says"),
    [
        (1e5, 2, "2 workers are slower than one (0.10x)"),
        (4e6, 4, "4 workers are no faster than one (1.00x)"),  # 2 + 6 s, for 8
        (4e6, 2, "2 workers are 1.33x one worker"),
        (1e9, 4, "4 workers are 3.95x one worker"),  # 8.004 s for 2 + 0.024 + 0.004
    ],
)
def test_a_number_that_was_asked_for_is_set_beside_one_worker(nbytes_per_s, workers, says):
    """It is never "worth using": of those that were not looked at, another may be faster."""
    machine = joined(["cpu"] * workers, nbytes_per_s)
    found = ranked(machine, workers=workers)
    assert {one.workers for one in found} == {workers}
    assert found.alone.step_s == ranked(machine).best_of[1].step_s
    assert found.worth is None
    assert found.workers_sentence == f"{says}; other numbers of workers were not compared"


@pytest.mark.parametrize("workers", [None, 2])
def test_the_gain_of_workers_that_wait_for_nobody_stands_beside_that_of_others(workers):
    """Eight GPUs were "worth using, 7.2x one": with an asynchronous strategy, which it hid."""
    links = [link("gpu0", "h", 4e6), link("gpu1", "h", 4e6)]
    machine = box("gpu", "gpu", links=links)
    found = ranked(machine, ALLREDUCE, STRATEGIES["hogbatch"], workers=workers)
    first, one = found[0], found.alone or found.best_of[1]
    assert (first.strategy, first.workers) == ("hogbatch", 2)
    same = next(one for one in found if one.strategy == "allreduce" and one.workers == 2)
    gain, plain = (each.samples_per_s / one.samples_per_s for each in (first, same))
    says = f" with hogbatch, which is not the same training, and {plain:.2f}x with allreduce"
    assert f"{gain:.2f}x one worker{says}" in found.workers_sentence
    for each in found:
        differs = each.strategy == "hogbatch" and each.workers > 1
        assert each.is_same_training is not differs
        assert any("not the same training" in note for note in each.notes) is differs


def test_without_one_worker_to_compare_with_it_is_said_what_training_is_meant():
    links = [link(f"gpu{i}", "h", 4e9) for i in range(3)]
    found = ranked(box("gpu", "gpu", "gpu", links=links), STRATEGIES["hogbatch"])
    several = replace(found, forecasts=tuple(one for one in found if one.workers > 1))
    says = "3 workers are worth using with hogbatch, which is not the same training"
    assert several.workers_sentence == says


def test_nothing_is_said_of_a_number_that_nothing_is_beside():
    """A whole batch does not fit into one device, its half does into each of two."""
    machine = joined(["cpu"] * 2, 4e6, device={"memory_bytes": 12_000_000 + 1000})

    def kept(samples: int) -> Workload:
        layers = tuple(replace(one, kept_nbytes=200 * samples) for one in workload(samples).layers)
        return replace(workload(samples), layers=layers)

    for asked in (2, None):
        found = search(kept, machine, [ALLREDUCE], 8, asked)
        assert [one.workers for one in found] == [2]
        assert (found.worth, found.workers_sentence) == (None, None)
    assert ranked(joined(["cpu"], 4e6), workers=1).workers_sentence == "1 worker is worth using"
    assert Ranking((), (), 8).workers_sentence is None


def test_efficiency_is_against_what_the_devices_do_alone():
    machine = joined(["cpu"] * 2, 4e6)
    found = ranked(machine, workers=2)
    # Alone each computes its 4 samples in 4 s; together they take 2 s longer.
    update_s = found[0].step_s - 6
    assert found[0].efficiency == pytest.approx((4 + update_s) / (6 + update_s))
    assert ranked(machine, workers=1)[0].efficiency == 1


def test_what_does_not_fit_in_memory_is_refused_and_the_rest_planned():
    # Parameters, gradients and momentum of 4 MB each are needed; one device has less.
    small = joined(["cpu"] * 2, 4e6, device={"memory_bytes": 11_999_999})
    found = ranked(small)
    assert not found.forecasts
    assert {refusal.workers for refusal in found.refused} == {1, 2}
    assert found.refused[0].why.startswith("cpu0 needs 0.012 GB and has 0.012 GB; a smaller batch")
    assert ranked(joined(["cpu"] * 2, 4e6, device={"memory_bytes": 12_000_000})).forecasts


def test_a_strategy_that_a_model_does_not_suit_says_so_and_the_rest_is_planned():
    def unsuited(*_):
        raise InvalidInput("model chain", "no layer can be split")

    picky = Strategy(name="picky", config=ALLREDUCE.config, plan=unsuited)
    found = ranked(joined(["cpu"] * 2, 4e6), ALLREDUCE, picky)
    assert {forecast.strategy for forecast in found} == {"allreduce"}
    assert [(one.strategy, one.workers, one.why) for one in found.refused] == [
        ("picky", 2, "model chain: no layer can be split")
    ]


def test_all_variants_of_a_strategy_are_forecast():
    def variants(workers: int) -> list:
        return [ALLREDUCE.config(workers=workers, bucket_mb=size) for size in (1, 25)]

    both = Strategy(name="both", config=ALLREDUCE.config, plan=ALLREDUCE.plan, variants=variants)
    found = ranked(joined(["cpu"] * 2, 4e6), both, workers=2)
    assert sorted(forecast.config.bucket_mb for forecast in found) == [1, 25]


def test_of_unequal_devices_the_fastest_are_found():
    slow = joined(["cpu"] * 3, 4e6)
    fast = slow.devices[2].model_copy(update={"flops_per_s": 8e9})
    uneven = slow.model_copy(update={"devices": (*slow.devices[:2], fast)})
    best = ranked(uneven)[0]
    assert (best.workers, best.devices, best.placement) == (1, ("cpu2",), "fastest")


def names(machine: Machine, workers: int) -> dict[str, list[str]]:
    return {
        name: [device.name for device in placed.devices[:workers]]
        for name, placed in placements(machine, workers).items()
    }


def test_workers_may_be_spread_over_hosts_or_stay_on_one():
    machine = box("cpu", "cpu", "cpu", "cpu", hosts="aabb")
    assert names(machine, 2) == {
        "as listed": ["cpu0", "cpu1"],
        "spread": ["cpu0", "cpu2"],
    }
    assert names(machine, 4) == {"as listed": ["cpu0", "cpu1", "cpu2", "cpu3"]}
    # The other devices stay, after those that are taken.
    spread = placements(machine, 2)["spread"]
    assert [device.name for device in spread.devices] == ["cpu0", "cpu2", "cpu1", "cpu3"]


def test_placements_that_take_the_same_devices_are_looked_at_once():
    assert list(names(box("cpu", "cpu"), 2)) == ["as listed"]


def test_as_many_workers_as_samples_at_most():
    with pytest.raises(InvalidInput, match=r"workers: 9 do not fit; .* allows 1 to 8"):
        ranked(joined(["cpu"] * 9, 4e6), workers=9)
