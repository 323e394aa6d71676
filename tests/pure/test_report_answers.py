"""What pages say first: each sentence against arithmetic done by hand."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.after_backward import AfterBackward
from paceline.core.cost import compute_lane
from paceline.core.outcome import Insight, UnevenWorker, Updates
from paceline.core.plan import Kind
from paceline.core.settings import TrainSettings
from paceline.core.timeline import Span, Timeline
from paceline.planner import Refusal
from paceline.records.result import (
    PlanRow,
    RankingRows,
    RunResult,
)
from paceline.report.insights import of_asynchronous, of_epochs
from paceline.report.markup import insights
from paceline.report.planned import of_plan
from plan_rows import plan_row
from traced_runs import COMPUTES, EXCHANGES, epoch, run, said

WAITS = {"load": 1, "forward": 2, "backward": 3, "update": 1, "exposed": 1, "idle": 8}
LOADS = {"load": 10, "forward": 4, "backward": 4, "update": 1, "exposed": 0, "idle": 1}


def one_slow_device() -> Timeline:
    """Return two steps of two devices, of which one computes for 3 s and the other for 1 s."""
    spans = []
    for step in range(2):
        for worker, (device, seconds) in enumerate((("cpu0", 3.0), ("cpu1", 1.0))):
            on = (compute_lane(device),)
            start, end = 4.0 * step, 4.0 * step + seconds
            spans.append(Span(Kind.FORWARD, step, "", worker, on, start, end))
            spans.append(Span(Kind.STEP, step, "", worker, on, 4 * step + 3, 4 * step + 4))
    return Timeline(spans, "measured")


class TestOfRun:
    def test_the_exchange_limits(self) -> None:
        found = said(run(EXCHANGES))
        assert found["limit"].sentence == (
            "Poor: forward and backward passes take 60.0 % of a step; what costs most beside them "
            "is exposed communication, 30.0 %."
        )
        assert found["change"].sentence.endswith(
            "without exposed communication a step would take 14.0 s instead of 20.0 s, at best "
            "1.43 times as fast."
        )
        # 128 samples in 2 * 12 + 8 s, for 64 in 20 s.
        twice = ("twice the batch size", "at best 1.25 times the samples/s")
        assert twice in found["change"].figures

    def test_the_exchange_takes_more_than_all_else(self) -> None:
        sentence = said(run(EXCHANGES | {"exposed": 26}))["limit"].sentence
        assert sentence.endswith("what limits is exposed communication, 65.0 %.")

    def test_computation_limits_and_nothing_is_to_be_changed(self) -> None:
        found = said(run(COMPUTES))
        assert found["limit"].sentence.startswith(
            "Good: forward and backward passes take 96.0 % of a step, so that computation limits"
        )
        assert found["change"].sentence.startswith("Change nothing in how the workers work")
        assert "1.02 times as fast" in found["change"].sentence  # 100 / 98

    @pytest.mark.parametrize(
        ("times", "advice"),
        [
            (0.76, "Try tree, predicted to take 15.2 s a step"),  # 1.13 * 0.76 < 0.87
            (0.78, "Exchange less"),  # closer than the range of predictions
            (2, "Exchange less"),
        ],
    )
    def test_another_plan_is_advised_only_if_it_is_clearly_faster(self, times, advice) -> None:
        other = plan_row(strategy="tree", step_s=20 * times)
        sentence = said(run(EXCHANGES, other))["change"].sentence
        assert sentence.startswith(advice)

    def test_a_plan_for_other_workers_is_no_alternative(self) -> None:
        other = plan_row(strategy="tree", workers=8, step_s=1)
        assert said(run(EXCHANGES, other))["change"].sentence.startswith("Exchange less")

    def test_the_slowest_worker_is_to_be_relieved(self) -> None:
        assert "Look at the two steps" in said(run(WAITS))["change"].sentence
        sentence = said(run(WAITS), one_slow_device())["change"].sentence
        # 3 s of forward, on average 2 s.
        assert "--balance auto), for the slowest worker computes 1.50 times the mean" in sentence

    def test_loading_is_named(self) -> None:
        sentence = said(run(LOADS))["change"].sentence
        assert sentence.startswith("Prepare the samples beforehand")
        assert "10.0 s instead of 20.0 s, at best 2.00 times" in sentence

    def test_more_and_fewer_workers(self) -> None:
        found = said(run(EXCHANGES))["workers"]
        # One alone: 2 * 12 + 0.4 s. Three: 12 * 2 / 3 + 8 s.
        assert "are 1.22 times as fast as one of them" in found.sentence
        assert "Another one may pay: at best 1.25 times" in found.sentence
        assert ("step with another worker, at best", "16.0 s") in found.figures
        stuck = said(run(EXCHANGES | {"exposed": 200.0}))["workers"]
        assert "Another one does not pay" in stuck.sentence

    def test_workers_of_different_speed_are_not_counted_as_equal(self) -> None:
        assert "workers" not in said(run(EXCHANGES, shares=(48, 16)))

    @pytest.mark.parametrize(("error", "than"), [(0.05, "no more than"), (-0.5, "more than")])
    def test_the_prediction_is_judged(self, error: float, than: str) -> None:
        sentence = said(run(COMPUTES, predicted_step_s=100 * (1 + error)))["prediction"].sentence
        assert f"off by {error:+.1%}, {than} the".replace("%", " %") in sentence

    def test_memory(self) -> None:
        found = said(run(COMPUTES))["memory"]
        assert "Memory leaves room" in found.sentence
        assert "37.5 %" in found.sentence  # 3/8 of 1 GiB
        full = said(run(COMPUTES, peak_memory_bytes=(2**29, 2**29)))["memory"]
        assert full.sentence.startswith("Memory is nearly full")

    @given(st.lists(st.just(0.0) | st.floats(1e-9, 1e6), min_size=6, max_size=6).filter(any))
    def test_gains_are_never_losses(self, seconds: list[float]) -> None:
        found = said(run(dict(zip(EXCHANGES, seconds, strict=True))))
        assert {"prediction", "limit", "change", "workers"} <= found.keys()
        for one in found.values():
            assert "nan" not in one.sentence
            if "at best" in one.sentence:
                _, _, rest = one.sentence.rpartition("at best ")
                assert float(rest.split()[0]) >= 1


class TestOfEpochs:
    @pytest.mark.parametrize(
        ("losses", "says"),
        [
            ((2, 1), "still fell by 50.0 % in the last epoch"),
            ((2, 1, 0.999), "fell by only 0.1 %"),
            ((2.303, 2.303, 2.302), "the model has not learnt"),
            ((1, 0.5, 0.6), "lowest after epoch 2 of 3, and is 20.0 % higher now: train for fewer"),
            ((1, 0.5, 0.502), "has hardly changed since"),
        ],
    )
    def test_more_or_fewer(self, losses: tuple[float, ...], says: str) -> None:
        epochs = [epoch(number, loss) for number, loss in enumerate(losses)]
        (found,) = of_epochs(epochs, "accuracy")
        assert says in found.sentence

    def test_an_accuracy_that_still_rises_is_not_hidden(self) -> None:
        epochs = [epoch(0, 0.5, 0.7), epoch(1, 0.6, 0.8)]
        (found,) = of_epochs(epochs, "accuracy")
        assert found.sentence.endswith("; but the accuracy was best after epoch 2.")

    def test_one_epoch_says_nothing(self) -> None:
        assert list(of_epochs([epoch(0, 1)], "accuracy")) == []


class TestOfPlan:
    def ranking(self, *plans: PlanRow, **changes: object) -> RankingRows:
        rows = RankingRows(
            plans=plans,
            refused=(),
            workers_worth=2,
            workers_sentence="2 workers are worth using",
            advice=None,
        )
        return rows.model_copy(update=changes)

    def test_the_best_beside_the_best_other(self) -> None:
        best = plan_row(step_s=1, samples_per_s=100, exposed_s=0.2)
        other = plan_row(strategy="tree", step_s=2, samples_per_s=50)
        found = {one.topic: one.sentence for one in of_plan(self.ranking(best, other))}
        assert "100 samples/s, 2.00 times those of tree on 2 workers" in found["method"]
        assert "rehearse both" not in found["method"]
        assert "800 ms instead of 1.00 s, at best 1.25 times" in found["change"]
        assert found["workers"] == "2 workers are worth using."
        assert "Good: it reaches 90.0 %" in found["limit"]

    def test_an_exchange_that_hides_is_not_what_to_change(self) -> None:
        """Nor are devices: with fewer workers than there are, more may be what helps."""
        best = plan_row(step_s=1, samples_per_s=100, exposed_s=0.02)
        found = {one.topic: one.sentence for one in of_plan(self.ranking(best))}
        assert found["change"] == (
            "The exchange hides, or costs nothing: without what shows of it a step would be at "
            "best 1.02 times as fast."
        )

    def test_nothing_is_said_of_workers_that_were_not_compared(self) -> None:
        rows = self.ranking(plan_row(), workers_worth=None, workers_sentence=None)
        assert "workers" not in {one.topic for one in of_plan(rows)}

    def test_what_exchanges_leave_after_backward_stands_with_its_figures(self) -> None:
        left = {"host": 0.001, "tree": 0.04}
        rows = [
            plan_row(strategy=name, after_backward=AfterBackward(0.1, 0.0, s, 0.1 + s, "it does"))
            for name, s in left.items()
        ]
        (found,) = [one for one in of_plan(self.ranking(*rows)) if one.topic == "exchange"]
        assert "1 ms are left with host, 40 ms with tree, because with host" in found.sentence
        assert found.figures == (("left with host", "1.00 ms"), ("left with tree", "40.0 ms"))
        assert said(run(COMPUTES, *rows))["exchange"].sentence == found.sentence

    def test_plans_that_are_too_close(self) -> None:
        best = plan_row(samples_per_s=100)
        other = plan_row(strategy="tree", samples_per_s=98)
        (method, *_) = of_plan(self.ranking(best, other))
        assert "their ranges overlap" in method.sentence
        assert "rehearse both" in method.sentence

    def test_nothing_to_plan(self) -> None:
        refused = (Refusal(strategy="tree", workers=2, placement="spread", why="too large"),)
        (found,) = of_plan(self.ranking(refused=refused))
        assert found.sentence.startswith("Nothing can be planned")


def test_uneven_workers() -> None:
    rows = tuple(
        UnevenWorker(
            name=name,
            spec="cpu:1",
            tried_samples_per_s=speed,
            samples=1,
            updates_share=0.5,
            predicted_share=None,
        )
        for name, speed in (("cpu0", 80.0), ("cpu1", 20.0))
    )
    result = RunResult(
        origin="measured",
        id="run",
        settings=TrainSettings(model="mlp", strategy="hogbatch"),
        strategy="hogbatch",
        machine={},
        workers=rows,
        updates=Updates(
            count=2,
            by_worker={"cpu0": 1, "cpu1": 1},
            staleness={"cpu0": {0: 3, 1: 1}, "cpu1": {3: 4}},
            mean_staleness=13 / 8,
        ),
        utilisation={"cpu0": 0.99, "cpu1": 0.6},
        epochs=(epoch(0, 1),),
        accuracy=0.5,
        trained_s=3.0,
        samples_per_s=75.0,
        predicted_samples_per_s=90.0,
    )
    sentences = [one.sentence for one in of_asynchronous(result)]
    assert "Fair: together the workers reach 75.0 % of the samples/s" in sentences[0]
    assert (
        "Give cpu1 larger batches, or leave it out: cpu1 computed for only 60.0 %" in sentences[1]
    )
    assert "off by +20.0 %, more than" in sentences[2]
    assert sentences[3] == "A batch missed 1.6 updates of other workers on average."  # 13 / 8
    # Tried beside other work: 150 samples/s are no 150 % of what two workers can.
    busier = result.model_copy(update={"samples_per_s": 150.0})
    (first, *_) = [one.sentence for one in of_asynchronous(busier)]
    assert first.startswith("Together the workers are 1.50 times as fast as one by one")
    assert first.endswith("the machine was busier then.")
    # Nobody is idle: nothing is to be changed.
    busy = result.model_copy(update={"utilisation": {"cpu0": 0.99, "cpu1": 0.9}})
    assert any(one.sentence.startswith("All devices are busy") for one in of_asynchronous(busy))


@pytest.mark.parametrize(("update_s", "verdict"), [(1, "may pay"), (4000, "does not pay")])
def test_a_second_worker_pays_only_if_there_is_something_to_divide(
    update_s: float, verdict: str
) -> None:
    parts = COMPUTES | {"update": update_s}
    found = said(run(parts, settings=TrainSettings(model="mlp", workers=1)))["workers"]
    assert found.sentence.startswith(f"A second worker {verdict}: at best 1.")


def test_what_is_shown_is_text() -> None:
    hostile = Insight("limit", "<b>loud</b>", (("<i>", "</span>"),))
    shown = insights([hostile, replace(hostile, topic="memory")])
    assert "<b>loud" not in shown
    assert shown.count("&lt;b&gt;loud&lt;/b&gt;") == 2
    assert "&lt;/span&gt;" in shown
    assert "Too little is known" in insights([])
