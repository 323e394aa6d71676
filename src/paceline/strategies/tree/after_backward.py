"""Work of the tree after backward: its whole exchange (Le et al. 2018, definition 3.4)."""

from paceline.core.after_backward import AfterBackward, BackwardPhase
from paceline.core.durations import duration
from paceline.core.plan import Kind


def after_backward(phase: BackwardPhase) -> AfterBackward:
    """Return T' = T_BP + the sum of all (t_aa + t_bc) of a simulated step, in its two parts."""
    summed_s = max(span.end_s for span in phase.exchange if span.kind is Kind.REDUCE)
    found = phase.explained("")
    up_s = summed_s - phase.end_s
    up, down = duration(up_s), duration(found.left_s - up_s)
    return phase.explained(
        f"nothing is sent before backward is over: sums take {up} and the way down {down}, "
        f"{duration(found.total_s)} with backward"
    )
