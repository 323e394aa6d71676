"""Find the rings that GPUs of a host can form concurrently over direct links, like NCCL.

On a DGX-1 with V100, two rings use the double links, and a third one the single links:

    0 - 1 - 3 - 5 - 7 - 6 - 4 - 2 -      twice
    0 - 3 - 2 - 1 - 7 - 4 - 5 - 6 -      once

Each of the three rings is used in both directions, so six rings use each GPU's six links. For a
DGX-1 with P100, which has four links per GPU, NCCL reports four rings (Jeaugey, NCCL 2.0, GTC
2017).
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice, pairwise
from math import floor

from paceline.core.machine import Device, DeviceKind, Machine, Station

_MOST_RANKS = 8  # most GPUs of a host without switches
_FEWEST_RANKS = 3  # two GPUs form no ring
_MOST_TRIED = 30  # candidates for each further ring; then the search settles for fewer rings
_ROUNDING = 1e-6
_Pair = frozenset[int]
_Order = tuple[int, ...]


def rings_at_once(machine: Machine, stations: Sequence[Station]) -> list[tuple[Station, ...]]:
    """Return the orders of the stations in concurrent rings over direct links.

    Empty if the stations are not GPUs, or their links form no ring. A link counts as a multiple of
    the narrowest one; each ring is included in both directions.
    """
    on_gpus = all(isinstance(one, Device) and one.kind == DeviceKind.GPU for one in stations)
    if not on_gpus or not _FEWEST_RANKS <= len(stations) <= _MOST_RANKS:
        return []
    number = {station.name: i for i, station in enumerate(stations)}
    widths: dict[_Pair, float] = defaultdict(float)
    for link in machine.links:
        one, other = link.between
        if one != other and one in number and other in number:
            widths[frozenset((number[one], number[other]))] += link.bandwidth_bytes_per_s
    if not widths:
        return []
    narrowest = min(widths.values())
    counts = frozenset(
        (pair, floor(width / narrowest + _ROUNDING)) for pair, width in widths.items()
    )
    orders = _disjoint(len(stations), counts)
    both = (way for order in orders for way in (order, order[::-1]))
    return [tuple(stations[i] for i in order) for order in both]


@lru_cache(maxsize=64)
def _disjoint(num_ranks: int, counts: frozenset[tuple[_Pair, int]]) -> tuple[_Order, ...]:
    """Return as many rings over all ranks as possible, none of which share a link."""
    spare = dict(counts)
    ends = (sum(n for pair, n in spare.items() if rank in pair) for rank in range(num_ranks))
    most = min(ends) // 2  # a ring uses two links of each rank

    def extended(chosen: tuple[_Order, ...], spare: Mapping[_Pair, int]) -> tuple[_Order, ...]:
        best = chosen
        for order in islice(_orders((0,), num_ranks, spare), _MOST_TRIED):
            used = Counter(map(frozenset, pairwise((*order, order[0]))))
            left = {pair: n - used[pair] for pair, n in spare.items()}
            found = extended((*chosen, order), left)
            best = max(best, found, key=len)
            if len(best) == most:
                break
        return best

    return extended((), spare)


def _orders(path: _Order, num_ranks: int, spare: Mapping[_Pair, int]) -> Iterator[_Order]:
    """Yield the rings over all ranks that start with a path, each in one direction."""
    if len(path) == num_ranks:
        closing = frozenset((path[-1], path[0]))
        if spare.get(closing, 0) > 0 and path[1] < path[-1]:
            yield path
        return
    for rank in range(num_ranks):
        if rank not in path and spare.get(frozenset((path[-1], rank)), 0) > 0:
            yield from _orders((*path, rank), num_ranks, spare)
