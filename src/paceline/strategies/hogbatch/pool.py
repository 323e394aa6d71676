"""The samples of an epoch that nobody has been given yet, as ranges of its order."""

from bisect import bisect_left


class Pool:
    """Every sample is handed out once; what comes back unused is handed out again.

    ValueError for ranges that come back without being out.
    """

    def __init__(self, num_samples: int) -> None:
        self._free = [range(num_samples)] if num_samples else []  # ascending, none adjacent
        self._out: dict[int, range] = {}  # by the first place

    def __len__(self) -> int:
        """Return how many samples are there to be handed out."""
        return sum(map(len, self._free))

    @property
    def is_empty(self) -> bool:
        """Whether nothing is there to be handed out."""
        return not self._free

    @property
    def is_done(self) -> bool:
        """Whether all samples have been used."""
        return not self._free and not self._out

    def take(self, size: int) -> range | None:
        """Hand out at most `size` samples; None if there are none.

        They are fewer at the end, and where what came back is not next to other samples.
        """
        if not self._free:
            return None
        found = self._free[0]
        taken, rest = found[:size], found[size:]
        if rest:
            self._free[0] = rest
        else:
            del self._free[0]
        self._out[taken.start] = taken
        return taken

    def use(self, taken: range) -> None:
        """Note that samples have been used."""
        self._take_back(taken)

    def give_back(self, taken: range) -> None:
        """Take samples back that were not used."""
        self._take_back(taken)
        free = self._free
        i = bisect_left(free, taken.start, key=lambda part: part.start)
        if i < len(free) and free[i].start == taken.stop:
            taken = range(taken.start, free.pop(i).stop)
        if i and free[i - 1].stop == taken.start:
            i -= 1
            taken = range(free.pop(i).start, taken.stop)
        free.insert(i, taken)

    def _take_back(self, taken: range) -> None:
        if self._out.get(taken.start) != taken:
            raise ValueError(f"samples {taken.start} to {taken.stop} are not handed out")
        del self._out[taken.start]
