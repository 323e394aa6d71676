"""What the ranks of a host share: its memory, and the sums made there."""

import torch

from paceline.links.arena import Arena
from paceline.links.segment import Segment
from paceline.links.shared_memory import Place
from paceline.probe.sample import Sampler, Spread
from paceline.training.this_machine import facts

_COPY_NBYTES = 128 * 2**20
_SHARE = 16  # of the memory, that all copies together may take
_NUM_FEW_VALUES = 64


def measure_copies(sampler: Sampler, place: Place) -> Spread:
    """Return bytes a second, read and written, of this rank's copies within the host's memory.

    All ranks copy at once: those of a host together reach what its memory allows.
    """
    memory_nbytes = int(facts(torch.device("cpu"))["memory_bytes"])
    nbytes = min(_COPY_NBYTES, memory_nbytes // _SHARE // len(place.members))
    source, target = torch.ones(nbytes // 4), torch.ones(nbytes // 4)
    return Spread.rate(2 * source.nbytes, sampler.seconds(lambda: target.copy_(source)))


def measure_sums(sampler: Sampler) -> Spread:
    """Return the seconds in which a host makes a sum of few values, and all its ranks know it.

    There are two ranks or more.
    """
    group = sampler.group
    nbytes = 4 * _NUM_FEW_VALUES
    arena = Arena.open(group, nbytes, 1, 0, group.deadline_s, scale=1.0, held=False)
    arena.slot.zero_()
    arena.set_chunks([[Segment(0, _NUM_FEW_VALUES, torch.float32)]])
    step = 0

    def once() -> None:
        nonlocal step
        step += 1
        arena.begin(step)
        arena.post(0)
        arena.commit()
        arena.wait_step()

    spread = Spread.of(sampler.seconds(once))
    arena.close()
    return spread
