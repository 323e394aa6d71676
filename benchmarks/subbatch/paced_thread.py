"""A communication thread whose exchanges take at least as long as a paced link does.

An exchange ends when its real messages have come and the link has had the time for its bytes, one
exchange after another.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

from torch import Tensor, nn

from paceline.codecs.gathering import Pending
from paceline.exchange.step import Share
from paceline.links.clock import clock_for
from paceline.links.group import Group
from paceline.record.recorder import Recorder
from paceline.strategies.subbatch.config import SubBatch
from paceline.strategies.subbatch.layer_gradients import CommunicationThread
from paceline.strategies.subbatch.paced import PacedHeadLayer, paced_optimizer
from paceline.strategies.subbatch.trainer import SplitModel, SplitTrainer

HEADER = 40  # bytes of a message


# Returns the seconds of an exchange on the paced link, by its result, the bytes that this rank has
# sent of activations or their gradients, and those of labels and the loss. One of gradients has
# neither, and the result are their sums.
Pace = Callable[[Tensor, int, int], float]


class PacedThread(CommunicationThread):
    """Exchanges as the strategy does, and holds each back for as long as `pace` says."""

    def __init__(self, group: Group, pace: Pace) -> None:
        super().__init__(group)
        self._pace = pace
        self.counted: SplitTrainer  # the one whose bytes are sent
        self.forget()

    def forget(self) -> None:
        """Begin to count anew."""
        self._free = self._busy = self._late = 0.0

    @property
    def late(self) -> float:
        """How much later real exchanges were than their pace, as a share of the link's time."""
        return self._late / self._busy

    def begin(
        self,
        post: Callable[[], Pending],
        on_done: Callable[[float, float], None] = lambda *_: None,
    ) -> Future[Tensor]:
        """Post an exchange, which does not end before the link has had the time for its bytes."""

        def on_link() -> Pending:
            before, began = self._sent, time.monotonic()
            begun = post()
            head, rest = (now - then for now, then in zip(self._sent, before, strict=True))

            def wait() -> Tensor:
                values = begun.wait()
                self._carry(began, self._pace(values, head, rest))
                return values

            return Pending(wait)

        return super().begin(on_link, on_done)

    def _carry(self, begun: float, seconds: float) -> None:
        """Wait until the link, free again then, has taken so long for an exchange."""
        real = time.monotonic()
        self._free = max(begun, self._free) + seconds
        self._busy += seconds
        if real > self._free:
            self._late += real - self._free
            self._free = real
        time.sleep(max(0.0, self._free - real))

    @property
    def _sent(self) -> tuple[int, int]:
        head, loss = self.counted.sent, self.counted.sent_of_loss
        return head.activations_sent + head.activation_gradients_sent, loss.activations_sent


class PacedTrainer:
    """The strategy's own steps, with a paced body, paced layers and a paced link."""

    def __init__(
        self,
        group: Group,
        config: SubBatch,
        pace: Pace,
        body: nn.Module,
        head: Sequence[PacedHeadLayer],
        source: Iterator[Share],
        batch_size: int,
    ) -> None:
        self.thread = PacedThread(group, pace)
        model = SplitModel(module=body, body=body, head=tuple(head), batch_size=batch_size)
        recorder = Recorder(clock_for(group.device), f"gpu{group.rank}", group.rank)
        updates = paced_optimizer(0.0)  # table 4 has no update
        self._trainer = SplitTrainer(model, config, group, recorder, updates, thread=self.thread)
        self.thread.counted = self._trainer
        self._source = source

    def step(self) -> None:
        """Take a step."""
        self._trainer.step(self._source)

    def close(self) -> None:
        """End its threads."""
        self._trainer.close()
