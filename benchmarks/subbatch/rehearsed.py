"""Compare printed, planned and rehearsed speed-ups of four GPUs (Dettmers 2016, section 5.1).

Four ranks emulate the GPUs. The strategy's real step runs over gloo, but layers sleep for the times
of table 4. An exchange ends when its real messages have arrived and the paper's board would have
carried its bytes, one exchange at a time. All times are `_SLOWER` times longer, so that loopback
keeps up.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from figures import shown, spread, table
from paceline.codecs.gathering import Pending
from paceline.exchange.step import Share
from paceline.links.clock import clock_for
from paceline.links.group import Group
from paceline.record.recorder import Recorder
from paceline.strategies.subbatch.layer_gradients import CommunicationThread
from paceline.strategies.subbatch.paced import PacedHeadLayer, paced_optimizer
from paceline.strategies.subbatch.trainer import SplitModel, SplitTrainer
from paceline.training.models.paced import PacedModel
from paceline.training.models.sharded import Sharding
from papers import dettmers8bit as paper
from ranks import Variant, alternate, on_ranks, timed

_SLOWER = 40.0
_PRINTED = {32: 3.53, 8: 3.67}
_ALONE = "alone"
_BODY_MS = [row.baseline_ms for row in paper.CONVOLUTIONS]
_HEADER_NBYTES, _BYTES_A_VALUE = 40, 1 + 4 / 1024  # of a message; of an encoded value


def part(quick: bool) -> dict[str, Any]:
    """Return the planned speed-ups, and those rehearsed on four ranks."""
    figures = on_ranks(Path(__file__).parent, "rehearsed", paper.BOARD_GPUS, quick)
    planned = {str(bits): paper.on_board(bits, paper.TOTAL_MS) for bits in _PRINTED}
    return figures | {"planned": planned}


def measure(group: Group, quick: bool) -> dict[str, Any]:
    """Return speed-ups with 32 and 8 bits, and how late real exchanges were."""
    boards = {str(bits): _Board(group, bits) for bits in _PRINTED}
    variants = [Variant(_ALONE, timed(_alone()), group.world_size)]
    for bits, board in boards.items():
        step = partial(board.trainer.step, _loaded())
        step()
        board.forget()
        variants.append(Variant(bits, timed(step), group.world_size))
    found = alternate(variants, group, *((2, 1) if quick else (5, 2)))
    seconds = {name: list(chain.from_iterable(times)) for name, times in found.items()}
    late = {bits: max(group.gather(board.late)) for bits, board in boards.items()}
    for board in boards.values():
        board.trainer.close()
    alone_s = seconds.pop(_ALONE)
    once = group.world_size * median(alone_s)
    speedups = {name: spread([once / one for one in times]) for name, times in seconds.items()}
    return {"slower": _SLOWER, "alone_s": spread(alone_s), "speedups": speedups, "late": late}


def _slow(ms: float) -> float:
    return 1e-3 * _SLOWER * ms


def _alone() -> Callable[[], None]:
    """Return the step of one GPU, with all layers and without exchanges."""
    model, source = _body(), _loaded()

    def step() -> None:
        features = model(next(source).inputs)
        time.sleep(_slow(paper.FC_MS))
        features.backward(torch.zeros_like(features))
        model.zero_grad()

    return step


def _loaded() -> Iterator[Share]:
    """Sleep for table 4's total time without its layers, then yield a batch."""
    targets = torch.zeros(paper.BATCH, dtype=torch.int64)
    for share in repeat(Share(torch.zeros(paper.BATCH, 1), targets, 1.0)):
        time.sleep(_slow(paper.TOTAL_MS - paper.FC_MS - sum(map(sum, _BODY_MS))))
        yield share


def _body() -> PacedModel:
    """Return a model that sleeps as long as the convolutions, and returns as many features."""
    whole, count = paper.alexnet(), len(_BODY_MS)
    return PacedModel(
        replace(whole, layers=whole.layers[:count], backward_order=tuple(reversed(range(count)))),
        [_slow(forward) for forward, *_ in _BODY_MS],
        [_slow(sum(backward)) for _, *backward in _BODY_MS],
        (paper.CONVOLUTIONS[-1].handed_on,),
    )


def _layer(row: paper.AlexNetLayer, group: Group) -> PacedHeadLayer:
    """Return a layer that sleeps for the times of table 4's model-parallel columns."""
    sharding = Sharding.even(row.outputs, group.world_size)
    return PacedHeadLayer(
        *(row.label, row.inputs[0], sharding, group.rank),
        lambda number, rows: tuple(_slow(ms * rows / paper.BATCH) for ms in row.parallel_ms),
    )


class _Board(CommunicationThread):
    """The strategy's communication thread, as slow as the paper's board; with its trainer."""

    def __init__(self, group: Group, bits: int) -> None:
        super().__init__(group)
        self._bits, self._peers = bits, group.world_size - 1
        body, head = _body(), tuple(_layer(row, group) for row in paper.CONNECTED)
        self.trainer = SplitTrainer(
            SplitModel(module=body, body=body, head=head, batch_size=paper.BATCH),
            paper.config_of(group.world_size, bits),
            group,
            Recorder(clock_for(group.device), f"gpu{group.rank}", group.rank),
            paced_optimizer(0.0),  # table 4 has no times of weight updates
            thread=self,
        )
        self.forget()

    def forget(self) -> None:
        """Begin counting how late exchanges are."""
        self._free = self._busy = self._late = 0.0

    @property
    def late(self) -> float:
        """Delay of real exchanges after the board's, relative to the time that the board needs."""
        return self._late / self._busy

    def begin(self, post: Callable[[], Pending], *on_done: Any) -> Future[Tensor]:
        """Start an exchange, which ends no earlier than on the board."""

        def on_board() -> Pending:
            before, began = self._sent(), time.monotonic()
            begun = post()
            sent = [now - then for now, then in zip(self._sent(), before, strict=True)]

            def wait() -> Tensor:
                values = begun.wait()
                self._carry(began, _slow(self._ms(values.nbytes, *sent)))
                return values

            return Pending(wait)

        return super().begin(on_board, *on_done)

    def _carry(self, began: float, seconds: float) -> None:
        """Sleep until the board, after earlier exchanges, has spent `seconds` on this one."""
        real = time.monotonic()
        planned = max(began, self._free) + seconds
        self._free = max(planned, real)
        self._busy += seconds
        self._late += self._free - planned
        time.sleep(self._free - real)

    def _ms(self, nbytes: int, head: int, rest: int) -> float:
        """Return the board's milliseconds for an exchange, in 8 bits with the codec's time.

        `head`, `rest`: sent bytes of activations or their gradients, and of labels and loss; both
        are 0 for the sum of weight gradients, of `nbytes` bytes.
        """
        if not head and not rest:
            return paper.exchange_ms(nbytes / (self._peers + 1), 32, True)
        bits = self._bits if head else 32
        each = (head or rest) / self._peers - _HEADER_NBYTES
        return paper.exchange_ms(each if bits == 32 else 4 * each / _BYTES_A_VALUE, bits, False)

    def _sent(self) -> tuple[int, int]:
        head, loss = self.trainer.sent, self.trainer.sent_of_loss
        return head.activations_sent + head.activation_gradients_sent, loss.activations_sent


def text(figures: dict[str, Any]) -> str:
    """Return the table of speed-ups."""
    lines = []
    for bits, printed in _PRINTED.items():
        ours, planned, late = (figures[key][str(bits)] for key in ("speedups", "planned", "late"))
        of_printed = f"{ours['median'] / printed - 1:+.1%}"
        rehearsed = shown(ours, digits=2)
        lines.append(
            (f"{bits}-bit", f"{printed}", f"{planned:.2f}", rehearsed, of_printed, f"{late:.1%}")
        )
    head = ("", "printed", "planned", "rehearsed", "of printed", "late")
    slower = f"{figures['slower']:g} times slower"
    alone = shown(figures["alone_s"], 1e3 / figures["slower"], 1)
    tables = table(f"Speed-ups of four GPUs, {paper.BATCH} images each; {slower}", head, lines)
    return f"{tables}\n\nOne GPU: {alone} ms a step, paced ({paper.TOTAL_MS} printed)."
