"""Write the sentences of a forecast (`why`, `notes`), and why a plan is refused."""

from collections.abc import Iterable, Sequence
from typing import Any

from paceline.core.after_backward import AfterBackward
from paceline.core.compare import Breakdown
from paceline.core.durations import duration
from paceline.core.strategy import StepsToLoss

_SHOWN_SLOWDOWN = 1.005
ASYNCHRONOUS = (
    "changes training: gradients are stale, because workers do not wait for each other's updates"
)


def of_parts(parts: Breakdown, slowdown: float, slowed_by: Sequence[str]) -> str:
    """Describe the parts of a step: computation, and exposed communication."""
    # The percentages refer to a device's time, because asynchronous devices have separate steps.
    share = 100 / (parts.compute_s + parts.exposed_s + parts.idle_s)
    text = f"computes {parts.compute_s * share:.0f} % of the step"
    if slowdown >= _SHOWN_SLOWDOWN:
        text += f" ({100 * (slowdown - 1):.0f} % slower {' and '.join(slowed_by)})"
    if not parts.communication_s:
        return f"{text}; nothing is exchanged"
    exposed = f"{parts.exposed_s * share:.0f} % is exposed communication"
    return f"{text}; {exposed}, of {duration(parts.communication_s)} in all"


def of_learning(steps: StepsToLoss | None) -> str:
    """Describe how many steps a strategy needs to reach the loss of synchronous training."""
    if steps is None:
        return "changes training: nobody has measured how many steps it needs to reach a loss"
    ratio = f"{steps.median:.2f}"
    if steps.low != steps.high:
        ratio += f" ({steps.low:.2f} to {steps.high:.2f})"
    return (
        f"changes training: needed {ratio} times as many steps as synchronous training to reach "
        f"the same loss, measured on {steps.measured_on}; other models may differ"
    )


def of_shortage(station: str, needed_nbytes: float, nbytes: float) -> str:
    """Describe a device or host with too little memory."""
    return (
        f"{station} needs {needed_nbytes / 1e9:.3g} GB and has {nbytes / 1e9:.3g} GB; use a "
        "smaller batch or more workers"
    )


def of_after_backward(plans: Iterable[Any]) -> str | None:
    """Compare the communication times left after backward; None if no plan reports them.

    `plans`: forecasts or rows of a table of forecasts, best first. The comparison includes only
    plans without a codec, on as many workers and on the same devices as the best such plan.
    """
    rows = [one for one in plans if one.after_backward is not None and one.codec is None]
    if not rows:
        return None
    first, found = rows[0], dict[str, AfterBackward]()
    for one in rows:
        if (one.workers, one.placement) == (first.workers, first.placement):
            found.setdefault(one.strategy, one.after_backward)
    backward = duration(min(one.backward_s for one in found.values()))
    left = ", ".join(f"{duration(one.left_s)} with {n} ({_hides(one)})" for n, one in found.items())
    workers = f"{backward} on each of {first.workers} workers"
    text = f"after backward ({workers}), the communication left is {left}"
    if len(found) == 1:
        return text
    ordered = sorted(found.items(), key=lambda item: item[1].overhead_s)
    added = " < ".join(f"{duration(one.overhead_s)} ({name})" for name, one in ordered)
    return f"{text}; added to backward: {added} (Le et al. 2018, section 3.2)"


def _hides(times: AfterBackward) -> str:
    text = f"hides {duration(times.hidden_s)} of {duration(times.exchange_s)}"
    return text + (f"; GPU synchronisation adds {duration(times.sync_s)}" if times.sync_s else "")
