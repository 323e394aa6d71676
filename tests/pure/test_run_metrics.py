"""Metrics of runs against values computed by hand, and the resulting advice."""

from dataclasses import asdict, replace
from itertools import product

import pytest

from findings import COMPUTES, EXCHANGES, advised, epoch, run, run_result
from paceline.core.cost import compute_lane
from paceline.core.outcome import Traffic, UnevenWorker
from paceline.core.plan import Kind
from paceline.core.settings import TrainSettings
from paceline.core.timeline import Span, Timeline
from paceline.records.result import RunResult
from paceline.report.advice import Metrics
from paceline.report.metrics import of_run, speedup
from paceline.strategies.wheel.config import Wheel
from plan_rows import plan_row

WAITS = {"load": 1, "forward": 2, "backward": 3, "update": 1, "exposed": 1, "idle": 8}
LOADS = {"load": 10, "forward": 4, "backward": 4, "update": 1, "exposed": 0, "idle": 1}
UPDATES = {"load": 0, "forward": 4, "backward": 8, "update": 6, "exposed": 1, "idle": 1}


def one_slow_device() -> Timeline:
    """Return two steps of two devices; one computes for 3 s, the other for 1 s."""
    spans = []
    for step, (worker, seconds) in product(range(2), enumerate((3.0, 1.0))):
        on, start = (compute_lane(f"cpu{worker}"),), 4.0 * step
        spans.append(Span(Kind.FORWARD, step, "", worker, on, start, start + seconds))
        spans.append(Span(Kind.STEP, step, "", worker, on, start + 3, start + 4))
    return Timeline(spans, "measured")


def metrics(result: RunResult, timeline: Timeline | None = None) -> dict[str, float]:
    return of_run(result, timeline).values


@pytest.mark.parametrize(
    ("parts", "metric", "value", "first"),
    [
        (EXCHANGES, "exposed", 6 / 20, "exchange"),
        (WAITS, "idle", 8 / 16, "waiting"),
        (LOADS, "loading", 10 / 20, "loading"),
        (UPDATES, "updating", 6 / 20, "update"),
        (COMPUTES, "computing", 96 / 100, "further_worker"),
    ],
)
def test_the_parts_of_a_step_are_metrics_and_the_largest_loss_comes_first(
    parts, metric, value, first
):
    assert metrics(run(parts))[metric] == pytest.approx(value)
    assert advised(run(parts))[0] == first


@pytest.mark.parametrize(
    ("own", "times", "other", "is_faster"),
    [
        (0.13, 0.78, 0.13, False),  # at most 1.13 * 0.78 = 0.881; the run at least 0.87
        (0.13, 0.76, 0.13, True),  # at most 0.859
        (0.3, 0.76, 0.13, False),  # 1.13 * 0.76 is not below 0.7
        (0.13, 0.76, 0.3, False),  # 1.3 * 0.76 > 0.87
        (0.01, 0.76, 0.28, True),  # 1.28 * 0.76 = 0.973 < 0.99
    ],
)
def test_another_strategy_is_advised_if_the_ranges_do_not_overlap(own, times, other, is_faster):
    plans = (
        plan_row(step_s=20, range_share=own),
        plan_row(strategy="tree", step_s=20 * times, range_share=other),
    )
    found = metrics(run(EXCHANGES, plans=plans, predicted_step_s=20))
    assert found.get("other_saves") == (pytest.approx(1 - times) if is_faster else None)
    # A plan with other workers, or one that changes training, is no alternative.
    for change in ({"workers": 8}, {"is_same_training": False}):
        changed = (plans[0], plans[1].model_copy(update=change))
        assert "other_saves" not in metrics(run(EXCHANGES, plans=changed, predicted_step_s=20))


def test_balancing_is_advised_unless_batches_are_balanced():
    slow = of_run(run(WAITS), one_slow_device())
    assert slow.values["unevenness"] == pytest.approx(1 - 2 / 3)  # 3 s, on average 2 s
    assert "balance" in advised(run(WAITS), one_slow_device())
    assert "balance" not in advised(run(WAITS, shares=(48, 16)), one_slow_device())


@pytest.mark.parametrize(
    ("count", "parts", "changes", "further", "times"),
    [
        # One worker takes 2 * 12 + 0.4 s instead of 20 s; a third worker saves a third of 12 s.
        (2, EXCHANGES, {}, 12 / 3 / 20, 24.4 / 20),
        (4, EXCHANGES, {}, 12 / 5 / 20, 48.4 / 20),
        (1, COMPUTES, {}, 96 / 2 / 100, None),  # a single worker
        (4, EXCHANGES, {"shares": (40, 8, 8, 8)}, None, None),  # unequal shares
        # Two workers share the cores, which one worker would have; on two hosts, a third would.
        (2, EXCHANGES, {"machine": {"device": "cpu"}}, None, None),
        (2, EXCHANGES, {"machine": {"device": "cpu", "hosts": 2}}, None, 24.4 / 20),
        (2, EXCHANGES, {"machine": {"device": "NVIDIA H100"}}, 12 / 3 / 20, 24.4 / 20),
    ],
)
def test_savings_by_a_further_worker_and_speedup(count, parts, changes, further, times):
    result = run(parts, settings=TrainSettings(model="net", workers=count), **changes)
    assert metrics(result).get("further_worker_saves") == (further and pytest.approx(further))
    assert speedup(result) == (times and pytest.approx(times))
    assert speedup(result.model_copy(update={"comparison": None})) is None  # asynchronous


def test_a_single_worker_is_advised_if_several_gain_nothing():
    result = run(EXCHANGES | {"exposed": 200.0})
    assert metrics(result)["alone_saves"] == pytest.approx(1 - 24.4 / 214)
    assert "no_gain" in advised(result)
    assert "no_gain" not in advised(run(EXCHANGES))


@pytest.mark.parametrize(("cores", "is_advised"), [(2, False), (3, True), (None, True)])
def test_a_further_worker_needs_a_core(cores, is_advised):
    machine = {} if cores is None else {"cores": cores}
    assert ("further_worker" in advised(run(COMPUTES, machine=machine))) is is_advised


@pytest.mark.parametrize(
    ("fact", "value", "code"),
    [
        ("predicted_step_s", 105, None),
        ("predicted_step_s", 50, "prediction_off"),
        ("predicted_step_s", 25298.3, "prediction_off"),
        # Memory counts as nearly full from 80 %.
        ("peak_memory_bytes", (2**28, 2**27), None),
        ("peak_memory_bytes", (2**29, 2**29), "memory"),
        ("peak_memory_bytes", (int(0.81 * 2**30),), "memory"),
    ],
)
def test_prediction_and_memory_are_judged(fact, value, code):
    found = set(advised(run(COMPUTES, **{fact: value}))) & {"prediction_off", "memory"}
    assert found == ({code} if code else set())


@pytest.mark.parametrize(
    ("epochs", "code"),
    [
        ([(2,), (1,)], "still_falling"),
        ([(2,), (1,), (0.999,)], None),
        ([(2.303,), (2.303,), (2.302,)], "not_learnt"),
        ([(1,), (0.5,), (0.6,)], "overfit"),
        ([(1,), (0.5,), (0.502,)], None),
        ([(0.5, 0.7), (0.6, 0.8)], None),  # the accuracy still rises
        ([(1,)], None),  # one epoch is not enough
    ],
)
def test_more_or_fewer_epochs_are_advised(epochs, code):
    result = run(COMPUTES, epochs=tuple(epoch(i, *known) for i, known in enumerate(epochs)))
    found = set(advised(result)) & {"still_falling", "not_learnt", "overfit"}
    assert found == ({code} if code else set())


def asynchronous(config: object = None, batch_size: int = 64, **facts: object) -> Metrics:
    """Return the metrics of a run of strategy wheel with these `facts`."""
    settings = TrainSettings(model="mlp", strategy="wheel", batch_size=batch_size)
    known = {"strategy": "wheel", "config": asdict(config or Wheel()), "samples_per_s": 100.0}
    return of_run(run_result(settings=settings, **known | facts), None)


def test_the_rate_of_all_workers_is_compared_with_the_sum_of_their_own_rates():
    workers = tuple(
        UnevenWorker(name, "cpu:1", speed, 1, updates_share=0.5, predicted_share=0.5)
        for name, speed in (("a", 50.0), ("b", 75.0))
    )
    assert asynchronous(workers=workers).values["lost_together"] == pytest.approx(1 - 100 / 125)
    unknown = (workers[0], replace(workers[1], tried_samples_per_s=None))
    assert "lost_together" not in asynchronous(workers=unknown).values


@pytest.mark.parametrize(
    ("config", "purpose", "is_advised"),
    [
        (Wheel(), "gradients", True),
        (Wheel(gradients="half"), "gradients", False),
        (Wheel(), "labels", False),  # no codec applies to labels
        (Wheel(), "hubs_gradients", False),  # nor to messages between hubs
    ],
)
def test_a_codec_is_advised_for_messages_that_support_one(config, purpose, is_advised):
    sent = (Traffic(purpose, 6e6, 6e6), Traffic("parameters", 4e6, 4e6))
    found = asynchronous(
        config, traffic=(*sent, Traffic("head_gradients", 9e9, 9e9, travels=False))
    )
    assert found.values["sent_as_is"] == pytest.approx(0.6)
    assert ("purpose" in found.words) is is_advised


@pytest.mark.parametrize(("workers", "lanes"), [(1, 1), (2, 2), (3, 2), (4, 2), (5, 3)])
def test_the_advised_number_of_workers_adds_one_lane_per_device(workers, lanes):
    """The placement of the configuration is the oracle: equal devices, one more lane on each."""
    devices = Wheel(workers=workers, lanes=lanes).workers_by_device
    busy = {f"cpu{number}": 0.5 for number in devices}
    found = asynchronous(Wheel(workers=workers, lanes=lanes), utilisation=busy)
    assert found.values["idle_device"] == 0.5
    _, more, _, named = found.words["more_lanes"].split()
    advised_config = Wheel(workers=int(more), lanes=int(named.removeprefix("lanes=")))
    advised_config.check_tree()
    assert advised_config.workers_by_device.keys() == devices.keys()
    assert {len(own) for own in advised_config.workers_by_device.values()} == {lanes + 1}


@pytest.mark.parametrize(
    ("config", "batch_size"),
    [
        # Alternating lanes fetch parameters a step early, which staleness=0 forbids.
        (Wheel(workers=1, lanes=1, staleness=0), 64),
        # A batch of three samples has none for a fourth worker.
        (Wheel(workers=3), 3),
    ],
)
def test_no_more_lanes_are_advised_if_none_are_possible(config, batch_size):
    found = asynchronous(config, batch_size, utilisation={"cpu1": 0.9, "cpu2": 0.5})
    assert found.words["device"] == "cpu2"
    assert "more_lanes" not in found.words
