"""Decide which ranks of a `DataParallel` get samples, by throughput with and without them."""

from collections.abc import Sequence

from paceline.core.balance import apportion

GAIN = 1.02  # use more workers only if they multiply the throughput by this factor or more


def refused_workers(
    speeds: Sequence[float], batch_size: int, most: Sequence[int | None] | None = None
) -> dict[int, str]:
    """Return the reason for refusing each worker that would add little throughput, by rank.

    Workers are admitted from the fastest to the slowest, until the remaining workers together would
    add less than 2 % of throughput. This assumes that a batch is split in proportion to the
    workers' speeds, and that exchanges take no time.

    `speeds`: samples per second of each worker alone. `most`: largest number of samples that each
    worker can take in a step; None: no limit.
    """
    bounds = most or [None] * len(speeds)

    def rate(ranks: Sequence[int]) -> float:
        """Return the throughput of the workers `ranks`; 0 if they cannot take a whole batch."""
        fit = [bounds[rank] for rank in ranks]
        if sum(batch_size if bound is None else bound for bound in fit) < batch_size:
            return 0.0
        parts = apportion(batch_size, [speeds[rank] for rank in ranks], fit)
        return batch_size / max(
            part / speeds[rank] for rank, part in zip(ranks, parts, strict=True)
        )

    order = sorted(range(len(speeds)), key=lambda rank: -speeds[rank])
    rates = [rate(order[: last + 1]) for last in range(len(order))]
    needed = next(last for last, one in enumerate(rates) if one * GAIN >= max(rates))
    refused = {}
    for rank in sorted(order[needed + 1 :]):
        # Best throughput of any group that contains this worker and all faster workers.
        together = max(rates[order.index(rank) :])
        refused[rank] = (
            f"worker {rank} ({speeds[rank]:.4g} samples/s) would hardly make training faster: "
            f"{together:.4g} samples/s in total with this worker, {rates[needed]:.4g} without"
        )
    return refused
