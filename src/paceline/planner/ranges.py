"""The range of a prediction: meant to hold the median of the measured steps in nine of ten cases.

Of a machine whose figures a profile has measured it is that of `benchmarks/planner`, where each
configuration was predicted and carried out; twice as much of an exchange if a file states them:
seven steps between two hosts of `benchmarks/codecs` lie within that, the worst 19 % off. Of one
with losses as others have published them it is that of the published tables of
`benchmarks/scaling_tables`: wide as soon as the exchange is a tenth of a step, as links and
frameworks differ by factors.
"""

from paceline.core.compare import Breakdown
from paceline.core.losses import BETWEEN_HOSTS, WITHIN_A_HOST
from paceline.core.machine import Machine

# Shares of the step: what holds without any exchange that shows, and what is added with all of it.
_PROFILED, _PROFILED_EXPOSED = 0.13, 0.13
_QUIET = 0.05  # unrest of a profile's steps that these shares contain
_STATED, _STATED_EXCHANGED = 0.13, 0.26
_PUBLISHED, _PUBLISHED_EXCHANGED, _HARDLY_EXCHANGED = 0.07, 2.5, 0.02
_WIDEST = 0.7


def half_width(machine: Machine, parts: Breakdown) -> float:
    """Return how far a measured step may be from the predicted one, as a share of it."""
    whole = parts.compute_s + parts.exposed_s + parts.idle_s
    if _is_profiled(machine):
        unrest = max(0.0, machine.usual_losses.unrest - _QUIET)
        return _PROFILED + _PROFILED_EXPOSED * parts.exposed_s / whole + unrest
    exchanged = min(1.0, parts.communication_s / whole)
    if machine.usual_losses not in (WITHIN_A_HOST, BETWEEN_HOSTS):
        return _STATED + _STATED_EXCHANGED * exchanged
    more = _PUBLISHED_EXCHANGED * max(0.0, exchanged - _HARDLY_EXCHANGED)
    return min(_WIDEST, _PUBLISHED + more)


def _is_profiled(machine: Machine) -> bool:
    """Return True if the figures were measured beside the other workers: no spread is added."""
    return not machine.usual_losses.spread
