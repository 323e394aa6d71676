"""Rules of advice, and metrics of a scaling study with synthetic cells."""

from string import Formatter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from findings import codes
from paceline.records.scale import ScaleCell, unrest_of
from paceline.report.advice import MOST_SHOWN, RULES, Metrics, findings, shown
from paceline.report.metrics import comparable, of_study
from scale_cells import cell, failed, study

GIVEN = {"share", "times"}  # words that a rule computes from its metric


def words_of(message: str) -> dict[str, str]:
    """Return a placeholder for each word that the result must supply to a message."""
    names = {name for _, name, _, _ in Formatter().parse(message) if name}
    return {name: f"<{name}>" for name in names - GIVEN}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_a_rule_finds_its_metric_above_its_threshold_alone(rule):
    words = words_of(rule.message)
    for value, found in ((rule.threshold, []), (rule.threshold + 1e-6, [rule.code])):
        metrics = Metrics({rule.metric: value}, words)
        assert [code for code in codes(findings(metrics)) if code == rule.code] == found
    (own,) = (one for one in findings(metrics) if one.code == rule.code)
    assert (own.metric, own.threshold) == (rule.metric, rule.threshold)
    assert all(word in own.message for word in words.values())
    assert rule.code not in codes(findings(Metrics(metrics.values, {}))) or not words


def test_codes_are_unique_and_exceptions_are_codes_of_earlier_rules():
    seen: list[str] = []
    for rule in RULES:
        assert set(rule.unless) <= set(seen)
        seen.append(rule.code)
    assert len(seen) == len(set(seen))


def test_doubts_precede_gains_and_larger_gains_precede_smaller_ones():
    values = {"computing": 0.95, "exposed": 0.1, "updating": 0.2, "unrest": 0.3, "loading": 0.05}
    words = {"timed": "steps", "twice_batch": "2", "exchange_less": "x"}
    found = findings(Metrics(values, words))
    assert codes(found) == ["busy", "update", "exchange", "loading", "computation"]
    assert list(shown(found)) == [one.message for one in found[:MOST_SHOWN]]


@pytest.mark.parametrize(
    ("first", "second"),
    [("balance", "waiting"), ("no_gain", "further_worker"), ("lanes", "idle_device")],
)
def test_a_finding_suppresses_a_later_rule_about_the_same_problem(first, second):
    both = [rule for rule in RULES if rule.code in (first, second)]
    metrics = Metrics()
    for rule in both:
        metrics.values[rule.metric] = rule.threshold + 0.5
        metrics.words |= words_of(rule.message)
    assert codes(findings(metrics)) == [first]


def timed(method: str, workers: int, epoch_s: float, *spread: float, **facts) -> ScaleCell:
    return cell(method, workers, epoch_s=epoch_s, spread=spread or (epoch_s, epoch_s), **facts)


def guess(method: str, workers: int, epoch_s: float, within: float = 0.13) -> ScaleCell:
    """Return a predicted cell whose range is the epoch plus or minus the share `within`."""
    spread = ((1 - within) * epoch_s, (1 + within) * epoch_s)
    return cell(method, workers, kind="predicted", epoch_s=epoch_s, spread=spread)


@pytest.mark.parametrize(
    ("cells", "saves"),
    [
        # 100 / 4 + 4 s instead of 100 / 4 + 9 s.
        (study({"tree": 40, "host": 4, "allreduce": 9}, (1, 2, 4)), 1 - 29 / 34),
        # Overlapping quartiles, then separate ones.
        ([timed("tree", 2, 10.0, 9.5, 10.9), timed("host", 2, 10.6, 10.1, 11.0)], None),
        ([timed("tree", 2, 10.0, 9.5, 10.9), timed("host", 2, 11.0, 10.95, 11.1)], 1 - 10 / 11),
        # Predicted: at most 1.13 * 10 = 11.3 s, and at least 0.87 * 13.1 = 11.4 or 0.87 * 12.9 s.
        ([guess("tree", 2, 10.0), guess("host", 2, 13.1)], 1 - 10 / 13.1),
        ([guess("tree", 2, 10.0), guess("host", 2, 12.9)], None),
        # A single worker exchanges nothing.
        ([timed("tree", 1, 10.0), timed("host", 1, 20.0)], None),
    ],
)
def test_the_fastest_method_is_reported_if_the_spreads_do_not_overlap(cells, saves):
    found = of_study(cells).values.get("best_saves")
    assert found == (saves and pytest.approx(saves))


@pytest.mark.parametrize(
    ("epochs_s", "needless"), [({1: 10, 2: 5.5, 4: 5.5}, 1 / 2), ({2: 11}, None)]
)
def test_workers_that_do_not_shorten_an_epoch_are_needless(epochs_s, needless):
    cells = [timed("tree", n, seconds) for n, seconds in epochs_s.items()]
    assert of_study(cells).values.get("needless_workers") == needless


@given(
    st.floats(0.1, 1e6), st.floats(0, 1e6), st.floats(0, 1e6), st.sampled_from(["strong", "weak"])
)
def test_the_three_parts_of_an_epoch_add_up(compute_s, exposed_s, idle_s, scaling):
    epoch_s = compute_s + exposed_s + idle_s
    one = cell("tree", 2, epoch_s=epoch_s, exposed_s=exposed_s, idle_s=idle_s, scaling=scaling)
    found = of_study([one]).values
    assert found["exposed"] == pytest.approx(exposed_s / epoch_s)
    assert found["exposed"] + found["idle"] + found["computing"] == pytest.approx(1)


def test_failed_cells_are_left_out_and_kinds_and_scalings_are_not_mixed():
    assert codes(findings(of_study([failed(), failed("tree")]))) == []
    cells = [
        cell("tree", 2),
        cell("host", 2, scaling="weak"),
        cell("host", 2, kind="predicted"),
        failed(),
    ]
    assert [(one.method, one.kind, one.scaling) for one in comparable(cells)] == [
        ("tree", "measured", "strong")
    ]


def test_differing_repetitions_raise_a_doubt_but_predictions_do_not():
    quiet, busy = cell(spread=(9.9, 10.1)), cell("host", spread=(8.0, 13.0))
    assert unrest_of([quiet, failed(), busy]) == pytest.approx(0.25)
    assert "busy" in codes(findings(of_study([quiet, busy])))
    assert "busy" not in codes(findings(of_study([quiet])))
    assert unrest_of([cell(kind="predicted", spread=(1.0, 20.0))]) == 0.0


def test_memory_is_full_if_the_fastest_cell_uses_most_of_it():
    for nbytes, is_full in ((13e9, True), (12e9, False)):  # of 16 GB
        found = codes(findings(of_study([cell(memory_bytes=int(nbytes))])))
        assert ("memory" in found) is is_full
