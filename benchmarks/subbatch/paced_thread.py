"""Exchange real messages, but at most as fast as an emulated link.

An exchange ends when its real messages have arrived and the emulated link would have transferred
its bytes. The emulated link transfers one exchange at a time.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from torch import Tensor, nn

from paceline.codecs.gathering import Pending
from paceline.links.clock import clock_for
from paceline.links.group import Group
from paceline.record.recorder import Recorder
from paceline.strategies.subbatch.config import SubBatch
from paceline.strategies.subbatch.layer_gradients import CommunicationThread
from paceline.strategies.subbatch.paced import PacedHeadLayer, paced_optimizer
from paceline.strategies.subbatch.trainer import SplitModel, SplitTrainer

HEADER = 40  # bytes of a message


# Returns the seconds of an exchange on the emulated link. Arguments: the exchange's result, this
# rank's sent bytes of activations or their gradients, and its sent bytes of labels and loss. For
# weight gradients, both byte counts are 0, and the result is their sum.
Pace = Callable[[Tensor, int, int], float]


class PacedThread(CommunicationThread):
    """The strategy's communication thread, with exchanges delayed to the link's `pace`."""

    def __init__(self, group: Group, pace: Pace) -> None:
        super().__init__(group)
        self._pace = pace
        self.counted: SplitTrainer  # counts the bytes of this thread's exchanges
        self.forget()

    def forget(self) -> None:
        """Reset the emulated link and its statistics."""
        self._free = self._busy = self._late = 0.0

    @property
    def late(self) -> float:
        """Delay of real exchanges after the emulated link, relative to the link's busy time."""
        return self._late / self._busy

    def begin(
        self,
        post: Callable[[], Pending],
        on_done: Callable[[float, float], None] = lambda *_: None,
    ) -> Future[Tensor]:
        """Start an exchange, which ends no earlier than on the emulated link."""

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
        """Sleep until the emulated link, after earlier exchanges, has spent `seconds` on this."""
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


def paced_trainer(
    group: Group,
    config: SubBatch,
    pace: Pace,
    body: nn.Module,
    head: Sequence[PacedHeadLayer],
    batch_size: int,
) -> SplitTrainer:
    """Return a trainer that takes the strategy's real steps, with paced body, head and link."""
    thread = PacedThread(group, pace)
    model = SplitModel(module=body, body=body, head=tuple(head), batch_size=batch_size)
    recorder = Recorder(clock_for(group.device), f"gpu{group.rank}", group.rank)
    updates = paced_optimizer(0.0)  # table 4 has no times of weight updates
    thread.counted = SplitTrainer(model, config, group, recorder, updates, thread=thread)
    return thread.counted
