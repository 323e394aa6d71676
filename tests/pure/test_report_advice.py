"""What a page advises: each sentence where it is right, and where it would be wrong to say it."""

import re
from dataclasses import asdict

import pytest

from paceline.core.outcome import Traffic
from paceline.core.settings import RehearseSettings, TrainSettings
from paceline.records.result import RunResult
from paceline.report.insights import brought, of_asynchronous
from paceline.strategies.wheel.config import Wheel
from plan_rows import plan_row
from traced_runs import COMPUTES, EXCHANGES, run, said

UPDATES = {"load": 0, "forward": 4, "backward": 8, "update": 6, "exposed": 1, "idle": 1}


def beside_another(own: float, times: float, other: float) -> RunResult:
    """Return a run predicted to take 20 s ± `own`, and tree `times` as long ± `other`."""
    plans = (
        plan_row(step_s=20, range_share=own),
        plan_row(strategy="tree", step_s=20 * times, range_share=other),
    )
    return run(EXCHANGES, plans=plans, predicted_step_s=20)


@pytest.mark.parametrize(
    ("own", "times", "other", "is_close"),
    [
        (0.13, 1.29, 0.13, True),  # from 0.87 * 1.29 = 1.122, and to 1.13
        (0.13, 1.31, 0.13, False),  # from 1.14
        (0.13, 0.78, 0.13, True),  # to 1.13 * 0.78 = 0.881, and from 0.87
        (0.13, 0.76, 0.13, False),  # to 0.859
        (0.01, 1.05, 0.01, False),  # nearer than predictions usually are, and known better
        (0.3, 1.28, 0.0, True),  # the own range alone holds both
        (0.0, 1.28, 0.3, True),  # the other's does
    ],
)
def test_others_are_too_close_where_the_ranges_of_both_overlap(own, times, other, is_close):
    sentence = said(beside_another(own, times, other))["prediction"].sentence
    close = ", too close to tell them apart" if is_close else ""
    told = f"Of the others, tree was predicted to take {times:.2f} times as long{close}."
    assert sentence.endswith(told)


@pytest.mark.parametrize(
    ("own", "other", "advice"),
    [
        (0.13, 0.13, "Try tree, predicted to take 15.2 s a step"),  # 1.13 * 0.76 < 0.87
        (0.3, 0.13, "Exchange less"),  # and not below 0.7
        (0.13, 0.3, "Exchange less"),  # 1.3 * 0.76 > 0.87
        (0.01, 0.28, "Try tree"),  # 1.28 * 0.76 = 0.973 < 0.99
    ],
)
def test_another_strategy_is_to_be_tried_only_if_both_ranges_say_so(own, other, advice):
    sentence = said(beside_another(own, 0.76, other))["change"].sentence
    assert sentence.startswith(advice)


def test_an_error_beyond_tenfold_is_named_in_times():
    sentence = said(run(COMPUTES, predicted_step_s=25_298.3))["prediction"].sentence
    assert "off by 253 times, more than the 6 %" in sentence


def of_workers(count: int, **changes: object) -> RunResult:
    return run(EXCHANGES, settings=TrainSettings(model="net", workers=count), **changes)


def test_what_the_second_worker_brought():
    # One alone: 2 * 12 + 0.4 s, for 20 s.
    assert brought(of_workers(2)) == (
        "with the second worker training is 1.22 times as fast as one of them with all samples of "
        "a step, by the parts of a step"
    )


def test_what_more_than_two_workers_brought():
    """None of them is "the second", and one alone would take 4 * 12 + 0.4 s, for 20 s."""
    assert brought(of_workers(4)) == (
        "the 4 workers are 2.42 times as fast as one of them with all samples of a step, by the "
        "parts of a step"
    )


@pytest.mark.parametrize(
    ("count", "changes"),
    [
        (1, {}),  # nobody beside it
        (4, {"shares": (40, 8, 8, 8)}),  # the mean of unequal parts is nobody's
        (4, {"comparison": None}),  # no step in common
    ],
)
def test_nothing_is_said_of_what_workers_brought_that_have_no_equal_parts(count, changes):
    assert brought(of_workers(count, **changes)) is None


def trained_by(**settings: object) -> str:
    """Return the advice for a run of which the update takes 6 s of 20 s."""
    asked = TrainSettings(model="net", workers=2, **settings)
    return said(run(UPDATES, settings=asked))["change"].sentence


@pytest.mark.parametrize(
    "settings", [{}, {"optimizer": "adamw"}, {"optimizer": "sgd", "momentum": 0.9}]
)
def test_larger_batches_or_a_lighter_optimizer_where_updates_take_most(settings):
    assert trained_by(**settings) == (
        "Take larger batches, which need fewer updates, or a lighter optimizer: without the weight "
        "update a step would take 14.0 s instead of 20.0 s, at best 1.43 times as fast."
    )
    rehearsed = RehearseSettings(model="net", workers=2, stretch=(2.0,))
    advice = said(run(UPDATES, settings=rehearsed))["change"].sentence
    assert advice.startswith("Take larger batches, which need fewer updates, or a lighter")


def test_no_optimizer_is_lighter_than_sgd_without_momentum():
    for settings in ({"momentum": 0.0}, {"optimizer": "SGD", "momentum": 0.0}):
        assert trained_by(**settings).startswith("Take larger batches, which need fewer updates: ")


@pytest.mark.parametrize(
    ("parts", "advice"),
    [
        (UPDATES | {"exposed": 7}, "Exchange less"),
        (UPDATES | {"backward": 400}, "Change nothing"),  # 6 s of 412 s
    ],
)
def test_updates_that_do_not_cost_most_or_hardly_cost_are_left_alone(parts, advice):
    assert said(run(parts))["change"].sentence.startswith(advice)


def of_wheel(config: Wheel, batch_size: int = 64, **facts: object) -> list[str]:
    """Return what is said of a run of strategy wheel, of which only `facts` are known."""
    result = RunResult(
        origin="measured",
        id="run",
        settings=TrainSettings(model="mlp", strategy="wheel", batch_size=batch_size),
        strategy="wheel",
        config=asdict(config),
        machine={},
        samples_per_s=75.0,
        **facts,
    )
    return [one.sentence for one in of_asynchronous(result)]


def sent(**nbytes: float) -> tuple[Traffic, ...]:
    """Return traffic of which as many bytes were planned: with the codec, where there is one."""
    within = Traffic("head_gradients", 9e9, 9e9, travels=False)
    return (*(Traffic(purpose, count, count) for purpose, count in nbytes.items()), within)


def test_a_codec_is_advised_for_what_is_most_of_the_bytes_on_the_wire():
    (sentence,) = of_wheel(Wheel(), traffic=sent(gradients=6e6, activations=3e6, labels=1e6))
    assert sentence == (
        "Of what travels, gradients are 60.0 % of the bytes; a codec for them (--codec) would save "
        "most."
    )


@pytest.mark.parametrize(
    ("config", "traffic", "told"),
    [
        # It has one: nothing is left for --codec to save.
        (Wheel(gradients="dynamic8"), sent(gradients=6e6, labels=4e6), "gradients are 60.0 %"),
        # Nothing encodes labels.
        (Wheel(), sent(gradients=4e6, labels=6e6), "labels are 60.0 %"),
        # Nor what hubs send each other.
        (Wheel(), sent(hubs_gradients=6e6, gradients=4e6), "hubs_gradients are 60.0 %"),
    ],
)
def test_no_codec_is_advised_for_what_has_one_or_takes_none(config, traffic, told):
    assert of_wheel(config, traffic=traffic) == [f"Of what travels, {told} of the bytes."]


@pytest.mark.parametrize(("workers", "lanes"), [(1, 1), (2, 2), (3, 2), (4, 2), (5, 3)])
def test_more_workers_that_alternate_are_one_more_on_each_device(workers, lanes):
    """The configuration's own placement is the oracle: as many devices, and a lane more on each."""
    config = Wheel(workers=workers, lanes=lanes)
    devices = config.workers_by_device
    busy = {f"cpu{number}": 0.5 for number in devices}
    (sentence,) = of_wheel(config, utilisation=busy)
    found = re.fullmatch(
        r"Let more workers alternate on a device \(--workers (\d+) --set lanes=(\d+)\): cpu1 "
        r"computed for only 50\.0 % of the time\.",
        sentence,
    )
    assert found is not None
    advised = Wheel(workers=int(found[1]), lanes=int(found[2]))
    advised.check_tree()
    assert advised.workers_by_device.keys() == devices.keys()
    assert {len(own) for own in advised.workers_by_device.values()} == {lanes + 1}


@pytest.mark.parametrize(
    ("config", "batch_size", "utilisation", "start"),
    [
        (Wheel(), 64, {"cpu1": 0.9}, "All devices are busy: the idlest, cpu1,"),
        # Lanes that alternate fetch a step ahead, which workers in step may not.
        (Wheel(workers=1, lanes=1, staleness=0), 64, {"cpu1": 0.5}, "Give cpu1 larger batches"),
        # Three samples are none for the fourth worker and those after it.
        (Wheel(workers=3), 3, {"cpu1": 0.9, "cpu2": 0.5}, "Give cpu2 larger batches"),
    ],
)
def test_no_more_workers_alternate_where_they_cannot_or_need_not(
    config, batch_size, utilisation, start
):
    (sentence,) = of_wheel(config, batch_size, utilisation=utilisation)
    assert sentence.startswith(start)
