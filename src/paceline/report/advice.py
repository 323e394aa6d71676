"""Derive advice from a result: a rule reports a finding if a metric exceeds a threshold.

In a rule of sort "gain", the metric is the largest fraction of a step that a change could save.
This fraction is estimated from the parts of a typical step, on two assumptions. More workers divide
the times of loading and of the forward and backward passes. All other times stay constant.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Literal, get_args

from paceline.core.losses import BUSY
from paceline.core.outcome import Finding
from paceline.planner import ERROR_BAR
from paceline.report.format import number, share

MOST_SHOWN = 3
_WORTH = 0.03  # least saving, as a fraction of a step, for which most rules suggest a change
_UNEVEN = 1 - 1 / 1.15  # unevenness to report: the slowest worker computes 1.15 times the mean
_HARDLY = 0.01  # relative change below which a loss counts as unchanged
Sort = Literal["doubt", "gain", "fact"]
_SORTS = get_args(Sort)


@dataclass
class Metrics:
    """A result's numbers, which rules compare (`values`), and texts for messages (`words`)."""

    values: dict[str, float] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Rule:
    """Reports `message` as a finding if the metric named `metric` exceeds `threshold`.

    `report.metrics` computes the metrics and the words of messages, such as `{exchange_less}`. A
    rule is skipped if `Metrics.words` lacks a text that `message` needs, or if a rule whose code is
    in `unless` has reported a finding. `sort`: "doubt" for a reason to mistrust the result, "gain"
    for time that a change could save, "fact" for anything else. With threshold 0, `report.metrics`
    decides whether the rule applies.
    """

    sort: Sort
    code: str
    metric: str
    threshold: float
    message: str
    unless: tuple[str, ...] = ()


RULES = (
    Rule(
        *("doubt", "busy", "unrest", BUSY),
        "Other programs ran on this machine: half of the {timed} differ by up to {share} from "
        "their median. Measure again when it is quiet.",
    ),
    Rule(
        *("doubt", "busier_before", "gained_together", ERROR_BAR),
        "Together the workers trained {share} more samples/s than in the trials one by one: other "
        "programs ran then. Train again when the machine is quiet.",
    ),
    Rule(
        *("doubt", "prediction_off", "prediction_error", 2 * ERROR_BAR),
        "The prediction was off by {share}: devices or links may have changed their speed since "
        "the profile. Try --profile-s 20.",
    ),
    Rule(
        *("doubt", "not_learnt", "loss_unchanged", 1 - _HARDLY),
        "Neither the training loss nor the test loss has changed in {epochs} epochs. Try another "
        "--learning-rate.",
    ),
    Rule(
        *("doubt", "close", "ranges_overlap", 0.0),
        "The predicted ranges of {best} and {other} overlap: either may be faster. {try_both}.",
    ),
    Rule(
        *("gain", "exchange", "exposed", _WORTH),
        "Workers wait for communication in {share} of a step. Without waiting, a step would be at "
        "best {times} times as fast. Try {exchange_less}.",
    ),
    Rule(
        *("gain", "balance", "unevenness", _UNEVEN),
        "The slowest worker computes {slowest} times as long as the mean. Try --balance auto.",
    ),
    Rule(
        *("gain", "other_strategy", "other_saves", 0.0),
        "Strategy {other} was predicted to take {share} less time for a step. Try --strategy "
        "{other}.",
    ),
    Rule(
        *("gain", "waiting", "idle", _WORTH),
        "Workers wait for each other in {share} of a step. report.html has a picture of two steps.",
        unless=("balance",),
    ),
    Rule(
        *("gain", "loading", "loading", _WORTH),
        "Loading samples takes {share} of a step. Prepare the samples beforehand, or make them "
        "smaller.",
    ),
    Rule(
        *("gain", "update", "updating", _WORTH),
        "The weight update takes {share} of a step. Try --batch-size {twice_batch}, which needs "
        "half as many updates.",
    ),
    Rule(
        *("gain", "calls", "calls", _WORTH),
        "Python and dispatch between operators take {share} of a step. Try --batch-size "
        "{twice_batch}, or fewer and larger layers.",
    ),
    Rule(
        *("gain", "no_gain", "alone_saves", -0.02),
        "The {workers} workers are {speedup} times as fast as one of them with all samples. Try "
        "--workers 1.",
    ),
    Rule(
        *("gain", "enough", "needless_workers", 0.0),
        "{worth} of {most} workers are enough: {most} are {effect}. Try --workers {worth}.",
    ),
    Rule(
        *("gain", "further_worker", "further_worker_saves", _WORTH),
        "One more worker would make a step at best {times} times as fast. Try --workers "
        "{more_workers}.",
        unless=("no_gain", "enough"),
    ),
    Rule(
        *("gain", "method", "best_saves", 0.02),
        "Strategy {best} takes {share} less time for an epoch than {second} {where}. Try "
        "--strategy {best}.",
    ),
    Rule(
        *("gain", "apart", "lost_together", 0.1),
        "Together the workers train {share} fewer samples/s than in the trials one by one. Try "
        "fewer --workers.",
    ),
    Rule(
        *("gain", "lanes", "idle_device", 0.2),
        "Device {device} computed nothing in {share} of the time. Try {more_lanes}.",
    ),
    Rule(
        *("gain", "idle_device", "idle_device", 0.2),
        "Device {device} computed nothing in {share} of the time. Give it larger batches, or leave "
        "it out.",
        unless=("lanes",),
    ),
    Rule(
        *("gain", "other_training", "other_training_saves", _WORTH),
        "{learns} reaches the same loss in {share} less time, measured on {measured_on}. Test this "
        "with your model.",
    ),
    Rule(
        *("fact", "other_rate", "times_the_rate", 0.0),
        "{right} trains {right_rate} samples/s, {ratio} times the {left_rate} of {left}.",
    ),
    Rule(
        *("fact", "unlike", "unlike_settings", 0.0),
        "The runs differ in {unlike}: compare samples/s, not seconds per step.",
    ),
    Rule(
        *("fact", "other_step", "step_changed", 0.02),
        "A traced step is {by} {longer}. {part} changed most, by {change}.",
        unless=("unlike",),
    ),
    Rule(
        *("fact", "same_setup", "same_setup", 0.0),
        "Settings and machine are the same: the difference is variation between runs.",
    ),
    Rule(
        *("fact", "overfit", "loss_risen", _HARDLY),
        "The test loss was lowest after epoch {best_epoch}, and is {share} higher now. Try "
        "--epochs {best_epoch}.",
    ),
    Rule(
        *("fact", "still_falling", "loss_fell", _HARDLY),
        "The test loss still fell by {share} in the last epoch. Try --epochs {twice_epochs}.",
    ),
    Rule(
        *("fact", "memory", "memory_used", 0.8),
        "Peak memory of {holder}: {share} of what is available. Try --accumulate 2 before a larger "
        "batch.",
    ),
    Rule(
        *("fact", "feature_maps", "feature_maps", 0.5),
        "Feature maps are {share} of the memory of a step, and grow with the batch. Try "
        "--accumulate 2 to halve them.",
    ),
    Rule(
        *("fact", "codec", "sent_as_is", 0.5),
        "{share} of the bytes sent between processes are {purpose}. Try --strategy-option "
        "{purpose}=dynamic8.",
    ),
    Rule(
        *("fact", "rounding", "codec_saves", 0.0),
        "Codec {codec} rounds what is sent, and makes a step {times} times as fast. Compare the "
        "loss with that of a run without it.",
    ),
    Rule(
        *("fact", "computation", "computing", 0.9),
        "Forward and backward take {share} of a step: no exchange could make it faster. Try "
        "--precision bfloat16, or a faster device.",
    ),
    Rule(
        *("fact", "stated_speed", "stated", 0.5),
        "Device speeds are those in the machine file. Pass your own for a better prediction, such "
        "as --measured 350/s for one device with 350 samples/s.",
    ),
    Rule(
        *("fact", "slowest_layer", "slowest_layer", 0.1),
        "Layer {layer} alone takes {share} of a step.",
    ),
)


def findings(of: Metrics) -> tuple[Finding, ...]:
    """Apply all rules to metrics; return doubts, then gains (largest first), then facts."""
    found: dict[str, tuple[tuple[int, float], Finding]] = {}
    for rule in RULES:
        value = of.values.get(rule.metric)
        if value is None or value <= rule.threshold or found.keys() & set(rule.unless):
            continue
        words = {"share": share(value), "times": number(1 / (1 - value)) if value < 1 else "many"}
        with suppress(KeyError):  # skip the rule if `words` lacks a text that its message needs
            known = {name: getattr(rule, name) for name in ("code", "metric", "threshold")}
            message = rule.message.format_map(of.words | words)
            place = _SORTS.index(rule.sort), -value if rule.sort == "gain" else 0.0
            found[rule.code] = place, Finding(**known, value=value, message=message)
    return tuple(finding for _, finding in sorted(found.values(), key=itemgetter(0)))


def shown(found: tuple[Finding, ...]) -> Iterator[str]:
    """Yield the messages of the first findings, at most MOST_SHOWN."""
    yield from (one.message for one in found[:MOST_SHOWN])


def of_unrest(unrest: float, timed: str) -> Iterator[str]:
    """Yield a warning if measurements vary too much, because other programs ran.

    `unrest`: relative spread of the measurements. `timed`: what was measured, such as "steps".
    """
    yield from shown(findings(Metrics({"unrest": unrest}, {"timed": timed})))
