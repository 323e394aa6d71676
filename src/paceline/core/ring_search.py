"""Find concurrent rings of a host's GPUs over direct links, as NCCL uses them.

On a DGX-1 with V100 GPUs, the first ring is used twice, because its links are double:

    0 - 1 - 3 - 5 - 7 - 6 - 4 - 2 -      twice
    0 - 3 - 2 - 1 - 7 - 4 - 5 - 6 -      once

Each of these three rings is used in both directions, which makes six rings over the six links of
every GPU. On a DGX-1 with P100 GPUs, which have four links, NCCL reports four rings (Jeaugey, NCCL
2.0, GTC 2017).
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice, pairwise
from math import floor

from paceline.core.machine import Machine, Station

_MOST_RANKS = 8  # hosts without switches have at most 8 GPUs
_FEWEST_RANKS = 3  # two GPUs form no ring
_MOST_TRIED = 30  # most candidates tried for each ring, even if others might allow more rings
_ROUNDING = 1e-6
_Pair = frozenset[int]
_Order = tuple[int, ...]


def rings_at_once(machine: Machine, stations: Sequence[Station]) -> list[tuple[Station, ...]]:
    """Return an order of the GPUs for each concurrent ring over direct links; [] if there is none.

    A link with twice the bandwidth of the slowest link can serve two rings. Each ring is returned
    in both directions.
    """
    if not _FEWEST_RANKS <= len(stations) <= _MOST_RANKS:
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
    """Search for as many rings as the links can serve at the same time.

    `counts`: how many rings the link between each pair of ranks can serve.
    """
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
    """Yield the rings over all ranks that begin with `path`, each in one direction only."""
    if len(path) == num_ranks:
        closing = frozenset((path[-1], path[0]))
        if spare.get(closing, 0) > 0 and path[1] < path[-1]:
            yield path
        return
    for rank in range(num_ranks):
        if rank not in path and spare.get(frozenset((path[-1], rank)), 0) > 0:
            yield from _orders((*path, rank), num_ranks, spare)
