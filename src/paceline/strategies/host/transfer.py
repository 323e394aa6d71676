"""What a device has to do for the exchange: bring gradients to the arena, and means back."""

from collections.abc import Sequence
from typing import Protocol

from paceline.exchange.layout import Chunk
from paceline.links.arena import Arena
from paceline.record.recorder import Recorder


class Transfer(Protocol):
    """How gradients come from a rank's device into shared memory, and their means back."""

    def begin(self, step: int, chunks: Sequence[Chunk], recorder: Recorder | None) -> None:
        """Begin a step in which these chunks are exchanged."""
        ...

    def send(self, chunk: Chunk, recorder: Recorder | None) -> None:
        """Copy the chunk's gradients into this rank's slot, and post it when that is done."""
        ...

    def arrive(self) -> None:
        """Return when all chunks that were sent are posted."""
        ...

    def receive(self, step: int) -> None:
        """Return when each gradient that changed on any rank is its mean, or will be by stream."""
        ...

    def abandon(self) -> None:
        """Forget a step that is void."""
        ...

    def close(self) -> None:
        """Give back what is held."""
        ...


def changed_on_any(arena: Arena, step: int) -> list[int]:
    """Return for each parameter whether its gradient has changed on any rank: 0 or 1."""
    changed: list[int] = arena.flags.numpy()[:, :, step % 2].max(0).tolist()
    return changed
