"""Findings about runs: each kind where it is right, with numbers that were computed by hand."""

from dataclasses import asdict
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from findings import COMPUTES, EXCHANGES, codes, epoch, numbers, run, said
from paceline.core.cost import compute_lane
from paceline.core.outcome import Insight, Traffic, UnevenWorker, Updates
from paceline.core.plan import Kind
from paceline.core.settings import RehearseSettings, TrainSettings
from paceline.core.timeline import Span, Timeline
from paceline.records.result import RunResult
from paceline.report.insights import brought, of_asynchronous, of_epochs
from paceline.strategies.wheel.config import Wheel
from plan_rows import plan_row

WAITS = {"load": 1, "forward": 2, "backward": 3, "update": 1, "exposed": 1, "idle": 8}
LOADS = {"load": 10, "forward": 4, "backward": 4, "update": 1, "exposed": 0, "idle": 1}
UPDATES = {"load": 0, "forward": 4, "backward": 8, "update": 6, "exposed": 1, "idle": 1}
BOTH = UPDATES | {"exposed": 7}


def one_slow_device() -> Timeline:
    """Return two steps of two devices, of which one computes for 3 s and the other for 1 s."""
    spans = []
    for step, (worker, seconds) in product(range(2), enumerate((3.0, 1.0))):
        on, start = (compute_lane(f"cpu{worker}"),), 4.0 * step
        spans.append(Span(Kind.FORWARD, step, "", worker, on, start, start + seconds))
        spans.append(Span(Kind.STEP, step, "", worker, on, start + 3, start + 4))
    return Timeline(spans, "measured")


@pytest.mark.parametrize(
    ("parts", "limit", "shares", "change", "told"),
    [
        # What is told: seconds without the loss and with it, and how many times as fast.
        (EXCHANGES, "partly.exchange", [60.0, 30.0], "exchange_less", [14.0, 20.0, 1.43]),
        (EXCHANGES | {"exposed": 26}, "exchange", [30, 65], "exchange_less", [14.0, 40.0, 2.86]),
        (COMPUTES, "computation", [96.0, 2.0], "nothing", [1.02]),  # 100 / 98
        (WAITS, "waiting", [31.2, 50.0], "find_waits", [8.0, 16.0, 2.0]),
        (LOADS, "loading", [40.0, 50.0], "faster_loading", [10.0, 20.0, 2.0]),
        (UPDATES, "partly.update", [60.0, 30.0], "lighter_updates", [14.0, 20.0, 1.43]),
        (
            BOTH,
            "partly.exchange",
            [46.2, 26.9],
            "exchange_less",
            [19, 26, 1.37],
        ),
        (UPDATES | {"backward": 400}, "computation", [98.1, 1.5], "nothing", [1.01]),  # 6 s of 412
    ],
)
def test_the_largest_loss_is_the_limit_and_what_to_change_and_gains_no_more_than_that(
    parts, limit, shares, change, told
):
    found = said(run(parts))
    for topic, code, expected in (("limit", limit, shares), ("change", change, told)):
        one = found[topic]
        assert (one.code, numbers(one.sentence)) == (f"{topic}.{code}", expected)
    if parts is EXCHANGES:  # 128 samples in 2 * 12 + 8 s, for 64 in 20 s
        (twice,) = [text for name, text in found["change"].figures if "twice" in name]
        assert numbers(twice) == [1.25]


@pytest.mark.parametrize(
    ("own", "times", "other", "is_close", "is_clearly_faster"),
    [
        (0.13, 1.29, 0.13, True, False),  # from 0.87 * 1.29 = 1.122, and to 1.13
        (0.13, 1.31, 0.13, False, False),  # from 1.14
        (0.13, 0.78, 0.13, True, False),  # to 1.13 * 0.78 = 0.881, and from 0.87
        (0.13, 0.76, 0.13, False, True),  # to 0.859
        (0.01, 1.05, 0.01, False, False),  # nearer than predictions usually are, and known better
        (0.3, 1.28, 0.0, True, False),  # the own range alone holds both
        (0.0, 1.28, 0.3, True, False),  # the other's does
        (0.3, 0.76, 0.13, True, False),  # 1.13 * 0.76 is not below 0.7
        (0.13, 0.76, 0.3, True, False),  # 1.3 * 0.76 > 0.87
        (0.01, 0.76, 0.28, False, True),  # 1.28 * 0.76 = 0.973 < 0.99
    ],
)
def test_ranges_tell_whether_another_plan_is_near(own, times, other, is_close, is_clearly_faster):
    plans = (
        plan_row(step_s=20, range_share=own),
        plan_row(strategy="tree", step_s=20 * times, range_share=other),
    )
    found = said(run(EXCHANGES, plans=plans, predicted_step_s=20))
    assert found["prediction"].code == f"prediction.usual.others_{'close' if is_close else 'apart'}"
    assert numbers(found["prediction"].sentence)[-1] == times
    tried = "other_strategy" if is_clearly_faster else "exchange_less"
    assert found["change"].code == f"change.{tried}"
    if is_clearly_faster:
        assert "tree" in found["change"].sentence
        assert numbers(found["change"].sentence)[0] == 15.2
    # A plan for other workers is no alternative.
    found = said(run(EXCHANGES, plan_row(strategy="tree", workers=8, step_s=20 * times)))
    assert found["change"].code == "change.exchange_less"
    assert found["prediction"].code == "prediction.usual"


def test_the_slowest_worker_is_to_be_relieved():
    found = said(run(WAITS), one_slow_device())["change"]
    assert found.code == "change.balance"
    assert numbers(found.sentence)[0] == 1.5  # 3 s of forward, on average 2 s
    assert said(run(WAITS, shares=(48, 16)), one_slow_device())["change"].code != "change.balance"


@pytest.mark.parametrize(
    ("count", "parts", "changes", "code", "more", "others"),
    [
        # Two: one alone takes 2 * 12 + 0.4 s for 20 s, and three 12 * 2 / 3 + 8 s.
        (2, EXCHANGES, {}, "more", [2, 1.22, 1.25], [1.22]),
        (2, EXCHANGES | {"exposed": 200.0}, {}, "enough", [2, 0.11, 1.02], [0.11]),
        (4, EXCHANGES, {}, "more", [4, 2.42, 1.14], [4, 2.42]),  # 4 * 12 + 0.4 s, and 48 / 5 + 8
        (1, COMPUTES, {}, "more", [1.92], None),  # 100 / 52; nobody is beside it
        (1, COMPUTES | {"update": 4000}, {}, "enough", [1.01], None),
        (4, EXCHANGES, {"shares": (40, 8, 8, 8)}, None, [], None),  # their mean is nobody's
    ],
)
def test_what_another_worker_would_bring_and_those_beside_one_brought(
    count, parts, changes, code, more, others
):
    result = run(parts, settings=TrainSettings(model="net", workers=count), **changes)
    found, sentence = said(result).get("workers"), brought(result)
    told = found and (found.code, numbers(found.sentence))
    assert told == (code and (f"workers.{code}", more))
    assert (sentence and numbers(sentence)) == others
    assert brought(result.model_copy(update={"comparison": None})) is None  # no step in common


@pytest.mark.parametrize(
    ("fact", "value", "code", "told"),
    [
        ("predicted_step_s", 105, "prediction.usual", [5.0, 6]),
        ("predicted_step_s", 50, "prediction.far_off", [-50.0, 6]),
        ("predicted_step_s", 25298.3, "prediction.far_off", [253.0, 6]),  # in times
        # Memory is nearly full from four fifths.
        ("peak_memory_bytes", (2**28, 2**27), "memory.room", [37.5]),
        ("peak_memory_bytes", (2**29, 2**29), "memory.nearly_full", [100]),
        ("peak_memory_bytes", (int(0.81 * 2**30),), "memory.nearly_full", [81]),
        ("peak_memory_bytes", (859, 0), "memory.room", [0]),
    ],
)
def test_prediction_and_memory_are_judged(fact, value, code, told):
    found = said(run(COMPUTES, **{fact: value}))[code.partition(".")[0]]
    assert (found.code, numbers(found.sentence)[-len(told) :]) == (code, told)


@given(st.lists(st.just(0.0) | st.floats(1e-9, 1e6), min_size=6, max_size=6).filter(any))
def test_gains_are_never_losses(seconds: list[float]):
    found = said(run(dict(zip(EXCHANGES, seconds, strict=True))))
    assert list(found) == ["prediction", "limit", "change", "workers", "memory"]
    for topic in ("change", "workers"):
        assert "nan" not in found[topic].sentence
        *_, gain = numbers(found[topic].sentence.replace("inf ", "1e9 "))
        assert gain >= 1


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        (TrainSettings(model="net", workers=2, optimizer="adamw"), "lighter_updates"),
        (TrainSettings(model="net", workers=2, optimizer="sgd", momentum=0.9), "lighter_updates"),
        (RehearseSettings(model="net", workers=2, stretch=(2.0,)), "lighter_updates"),
        (TrainSettings(model="net", workers=2, optimizer="SGD", momentum=0.0), "fewer_updates"),
    ],
)
def test_no_optimizer_is_lighter_than_sgd_without_momentum(settings, code):
    assert said(run(UPDATES, settings=settings))["change"].code == f"change.{code}"


@pytest.mark.parametrize(
    ("epochs", "code", "told"),
    [
        ([(2,), (1,)], "more", [50.0]),
        ([(2,), (1,), (0.999,)], "hardly_more", [0.1]),
        ([(2.303,), (2.303,), (2.302,)], "not_learnt", [3]),
        ([(1,), (0.5,), (0.6,)], "fewer", [2, 3, 20.0]),
        ([(1,), (0.5,), (0.502,)], "fewer_do", [2, 3]),
        ([(0.5, 0.7), (0.6, 0.8)], "score_still_rose", [1, 2, 20.0, 2]),
        ([(1,)], None, []),  # one epoch says nothing
    ],
)
def test_more_or_fewer_epochs(epochs, code, told):
    found = list(of_epochs([epoch(i, *known) for i, known in enumerate(epochs)], "accuracy"))
    assert codes(found) == ([f"epochs.{code}"] if code else [])
    assert [numbers(one.sentence) for one in found] == ([told] if code else [])


def asynchronous(config: object = None, batch_size: int = 64, **facts: object) -> list[Insight]:
    """Return the findings about a run of strategy wheel of which only `facts` are known."""
    result = RunResult(
        origin="measured",
        id="run",
        settings=TrainSettings(model="mlp", strategy="wheel", batch_size=batch_size),
        strategy="wheel",
        config=asdict(config or Wheel()),
        machine={},
        **{"samples_per_s": 75.0} | facts,
    )
    return list(of_asynchronous(result))


def test_uneven_workers():
    rows = tuple(
        UnevenWorker(name, "cpu:1", speed, 1, 0.5, None)
        for name, speed in (("cpu0", 80.0), ("cpu1", 20.0))
    )
    staleness = {"cpu0": {0: 3, 1: 1}, "cpu1": {3: 4}}
    updates = Updates(2, {"cpu0": 1, "cpu1": 1}, staleness, 13 / 8)
    facts = {"workers": rows, "updates": updates, "predicted_samples_per_s": 90.0}
    found = asynchronous(utilisation={"cpu0": 0.99, "cpu1": 0.9}, **facts)
    assert [(one.code, numbers(one.sentence)) for one in found] == [
        ("limit.together", [75.0]),
        ("workers.busy", [90.0]),
        ("prediction.far_off", [20.0, 6]),
        ("updates.staleness", [1.6]),
    ]
    assert found[-1].figures == (("cpu0 missed", "0.2"), ("cpu1 missed", "3.0"))
    # Tried beside other work: 150 samples/s are no 150 % of what two workers can.
    busier, *_ = asynchronous(samples_per_s=150.0, **facts)
    assert (busier.code, numbers(busier.sentence)) == ("limit.busier_before", [1.5])


@pytest.mark.parametrize(
    ("config", "traffic", "most", "code"),
    [
        (Wheel(), {"gradients": 6e6, "labels": 4e6}, "gradients", "traffic.codec"),
        # It has one: nothing is left for --codec to save.
        (Wheel(gradients="dynamic8"), {"gradients": 6e6, "labels": 4e6}, "gradients", None),
        (Wheel(), {"gradients": 4e6, "labels": 6e6}, "labels", None),  # nothing encodes labels,
        (Wheel(), {"hubs_gradients": 6e6, "gradients": 4e6}, "hubs_gradients", None),  # nor these
    ],
)
def test_a_codec_is_advised_for_most_of_the_bytes_if_they_can_have_one(config, traffic, most, code):
    # As many bytes were planned: with the codec, where there is one.
    sent = [Traffic(purpose, count, count) for purpose, count in traffic.items()]
    sent.append(Traffic("head_gradients", 9e9, 9e9, travels=False))
    (found,) = asynchronous(config, traffic=tuple(sent))
    assert found.code == (code or "traffic.most")
    assert numbers(found.sentence) == [60.0]
    assert [name for name, _ in found.figures] == [most]


@pytest.mark.parametrize(("workers", "lanes"), [(1, 1), (2, 2), (3, 2), (4, 2), (5, 3)])
def test_more_workers_that_alternate_are_one_more_on_each_device(workers, lanes):
    """The configuration's own placement is the oracle: as many devices, and a lane more on each."""
    devices = Wheel(workers=workers, lanes=lanes).workers_by_device
    busy = {f"cpu{number}": 0.5 for number in devices}
    (found,) = asynchronous(Wheel(workers=workers, lanes=lanes), utilisation=busy)
    assert found.code == "change.more_lanes"
    more, share = numbers(found.sentence.replace("lanes=", " "))[::2]
    advised = Wheel(workers=int(more), lanes=lanes + 1)
    advised.check_tree()
    assert share == 50.0
    assert f"--workers {advised.workers} --set lanes={advised.lanes}" in found.sentence
    assert advised.workers_by_device.keys() == devices.keys()
    assert {len(own) for own in advised.workers_by_device.values()} == {lanes + 1}


@pytest.mark.parametrize(
    ("config", "batch_size", "utilisation", "code"),
    [
        (Wheel(), 64, {"cpu1": 0.9}, "workers.busy"),
        # Lanes that alternate fetch a step ahead, which workers in step may not.
        (Wheel(workers=1, lanes=1, staleness=0), 64, {"cpu1": 0.5}, "change.larger_batches"),
        # Three samples are none for the fourth worker and those after it.
        (Wheel(workers=3), 3, {"cpu1": 0.9, "cpu2": 0.5}, "change.larger_batches"),
    ],
)
def test_no_more_workers_alternate_where_none_can_or_need(config, batch_size, utilisation, code):
    (found,) = asynchronous(config, batch_size, utilisation=utilisation)
    assert found.code == code
    assert list(utilisation)[-1] in found.sentence
