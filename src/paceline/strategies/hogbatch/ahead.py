"""How many batches a worker is given beforehand.

A message wakes a process, which takes as long as a short batch does. A worker therefore has some
of them beforehand, and says after several what it has done; `policy.next_batch` is asked as if what
was handed out were done.
"""

from collections.abc import Sequence

MOST_TOLD = 32  # batches in one message
TELL_WITHIN_S = 0.02  # of a batch's end
_AHEAD_S = 0.05  # of work; asking for the next takes some 0.3 ms
_FEWEST_LEFT = 10  # times what is given beforehand, so that nobody waits for it at the epoch's end


def wants_more(given_s: Sequence[float], left_s: float) -> bool:
    """Return whether a worker gets another batch, that has batches of so many seconds in hand.

    `left_s` is what all workers together need for the rest of the epoch.
    """
    if not given_s:
        return True
    return len(given_s) < MOST_TOLD and sum(given_s) < min(_AHEAD_S, left_s / _FEWEST_LEFT)
