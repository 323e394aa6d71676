"""Rules of advice: thresholds, exceptions and the order of findings."""

from string import Formatter

import pytest

from findings import codes
from paceline.report.advice import MOST_SHOWN, RULES, Metrics, findings, shown

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
