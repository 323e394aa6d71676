"""The condition that decides between exchanges of one machine (Le et al. 2018, section 3.2)."""

from collections.abc import Iterable
from typing import Protocol, TypeVar

from paceline.core.after_backward import AfterBackward
from paceline.core.durations import duration


class Planned(Protocol):
    """A forecast, or the row of one."""

    @property
    def strategy(self) -> str:
        """Its name."""

    @property
    def workers(self) -> int:
        """Number of workers that exchange gradients."""

    @property
    def placement(self) -> str:
        """Says which devices they have."""

    @property
    def codec(self) -> str | None:
        """The codec by which anything travels."""

    @property
    def after_backward(self) -> AfterBackward | None:
        """Work that the exchange leaves after backward."""


P = TypeVar("P", bound=Planned)


def compared(plans: Iterable[P]) -> dict[str, P]:
    """Return the best plan of each strategy that says what it leaves after backward, by its name.

    `plans` are ordered best first. All are without a codec, on as many workers and on the same
    devices as the best of them.
    """
    telling = [one for one in plans if one.after_backward is not None and one.codec is None]
    found: dict[str, P] = {}
    for plan in telling:
        if (plan.workers, plan.placement) == (telling[0].workers, telling[0].placement):
            found.setdefault(plan.strategy, plan)
    return found


def after_backward_sentence(plans: Iterable[Planned]) -> str | None:
    """Return what each exchange leaves after backward, and which adds the least to it.

    `plans` are ordered best first; None if no strategy among them says what it leaves.
    """
    found = compared(plans)
    known = {name: one.after_backward for name, one in found.items() if one.after_backward}
    if not known:
        return None
    workers = next(iter(found.values())).workers
    (first, one), *others = known.items()
    left = [f"{duration(one.left_s)} are left with {first}"]
    left += [f"{duration(other.left_s)} with {name}" for name, other in others]
    backward = duration(min(each.backward_s for each in known.values()))
    reasons = "; ".join(f"with {name} {each.because}" for name, each in known.items())
    start = f"after backward, which takes {backward} on each of {workers} workers,"
    return f"{start} {', '.join(left)}, because {reasons}{_decided(known)}"


def _decided(known: dict[str, AfterBackward]) -> str:
    """Return which of several adds the least to backward, and how much each adds."""
    if len(known) < 2:
        return ""
    ordered = sorted(known.items(), key=lambda item: item[1].overhead_s)
    added = " < ".join(f"{duration(one.overhead_s)} ({name})" for name, one in ordered)
    return f"; so {ordered[0][0]} adds less to backward: {added} (Le et al. 2018, section 3.2)"
