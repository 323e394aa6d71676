"""Compare printed, planned and rehearsed speed-ups of four GPUs (Dettmers 2016, section 5.1).

Four ranks emulate the GPUs. The strategy's real step runs over gloo, but layers sleep for the times
of table 4, and an exchange lasts at least as long as on the paper's board (see paced_thread.py).
All times are `SLOWER` times longer, so that loopback keeps up.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from statistics import median
from typing import Any

import torch
from paced_thread import HEADER, paced_trainer
from torch import Tensor, nn

from figures import shown, spread, table
from paceline.exchange.step import Share
from paceline.links.group import Group
from paceline.records.machine_file import find_machine
from paceline.strategies.subbatch.config import SubBatch
from paceline.strategies.subbatch.paced import PacedHeadLayer
from paceline.strategies.subbatch.trainer import SplitTrainer
from paceline.training.models.paced import PacedModel
from paceline.training.models.sharded import Sharding
from papers import dettmers8bit as board
from papers import dettmers8bit_planned as network
from ranks import Variant, alternate, on_ranks, timed

SLOWER = 40.0
_PRINTED = {32: 3.53, 8: 3.67}
_ALONE = "alone"
_CODECS = {32: None, 8: "dynamic8"}
_BYTES_A_VALUE = 1 + 4 / 1024


def part(quick: bool) -> dict[str, Any]:
    """Return the planned speed-ups, and those rehearsed on four ranks."""
    figures = on_ranks(Path(__file__).parent, "rehearsed", board.GPUS, quick)
    figures["planned"] = {
        str(bits): {
            "machine": board.simulated(bits),
            "table 3": board.simulated(bits, as_table_3=True),
        }
        for bits in _PRINTED
    }
    return figures


def measure(group: Group, quick: bool) -> dict[str, Any]:
    """Return speed-ups with 32 and 8 bits, and the lateness of the paced links."""
    blocks, steps = (2, 1) if quick else (5, 2)
    alone = _Alone()
    together = {bits: _together(group, codec) for bits, codec in _CODECS.items()}
    variants = [Variant(_ALONE, timed(alone.step), group.world_size)]
    for bits, one in together.items():
        step = partial(one.step, loaded())
        step()
        one.thread.forget()
        variants.append(Variant(str(bits), timed(step), group.world_size))
    found = alternate(variants, group, blocks, steps)
    seconds = {name: list(chain.from_iterable(times)) for name, times in found.items()}
    late = {str(bits): max(group.gather(one.thread.late)) for bits, one in together.items()}
    for one in together.values():
        one.close()
    alone_s = seconds.pop(_ALONE)
    once = group.world_size * median(alone_s)
    speedups = {name: spread([once / one for one in times]) for name, times in seconds.items()}
    return {"slower": SLOWER, "alone_s": spread(alone_s), "speedups": speedups, "late": late}


def _spend(ms: float) -> None:
    time.sleep(1e-3 * SLOWER * ms)


def paced_body() -> nn.Module:
    """Return a model that sleeps as long as the convolutions and outputs their feature count."""
    whole = network.alexnet()
    layers = tuple(  # with parameter names that begin with the layer name
        replace(
            layer,
            parameters=tuple(replace(p, name=f"{layer.name}.{p.name}") for p in layer.parameters),
        )
        for layer in whole.layers[: len(network.CONVOLUTIONS)]
    )
    order = tuple(reversed(range(len(layers))))
    times = [row.baseline_ms for row in network.CONVOLUTIONS]
    scale = 1e-3 * SLOWER
    return PacedModel(
        replace(whole, layers=layers, backward_order=order),
        [scale * forward for forward, *_ in times],
        [scale * sum(backward) for _, *backward in times],
        (network.CONVOLUTIONS[-1].handed_on,),
    )


def loaded(num_samples: int = network.BATCH) -> Iterator[Share]:
    """Sleep for table 4's total time without its layers, then yield a batch."""
    listed = sum(sum(row.baseline_ms) for row in network.CONVOLUTIONS)
    targets = torch.zeros(num_samples, dtype=torch.int64)
    for share in repeat(Share(torch.zeros(num_samples, 1), targets, 1.0)):
        _spend(network.TOTAL_MS - network.FC_MS - listed)
        yield share


class _Alone:
    """Takes steps as on one GPU, with all layers and without exchanges."""

    def __init__(self) -> None:
        self._model, self._source = paced_body(), loaded()

    def step(self) -> None:
        share = next(self._source)
        features = self._model(share.inputs)
        _spend(network.FC_MS)
        features.backward(torch.zeros_like(features))
        self._model.zero_grad()


def _layer(row: network.AlexNetLayer, group: Group) -> PacedHeadLayer:
    """Return a layer that sleeps for the times of table 4's model-parallel columns."""
    sharding = Sharding.even(row.outputs, group.world_size)
    forward, errors, weights = (1e-3 * SLOWER * ms / network.BATCH for ms in row.parallel_ms)
    return PacedHeadLayer(
        *(row.label, row.inputs[0], sharding, group.rank),
        lambda number, rows: (forward * rows, errors * rows, weights * rows),
    )


class _Board:
    """The `Pace` of the paper's board; an 8-bit exchange includes the codec's time."""

    def __init__(self, bits: int, num_ranks: int) -> None:
        self._board = find_machine("pcie-4gpu")
        self._bits, self._peers = bits, num_ranks - 1

    def __call__(self, values: Tensor, head: int, rest: int) -> float:
        """Return an exchange's seconds from its uncompressed bytes for each other GPU."""
        if not head and not rest:
            return self._taken(values.nbytes / (self._peers + 1), 32, is_gradient=True)
        bits = self._bits if head else 32
        nbytes = (head or rest) / self._peers - HEADER
        return self._taken(nbytes if bits == 32 else 4 * nbytes / _BYTES_A_VALUE, bits)

    def _taken(self, nbytes: float, bits: int, is_gradient: bool = False) -> float:
        return 1e-3 * SLOWER * board.sync_ms(self._board, nbytes, bits, is_gradient)


def _together(group: Group, codec: str | None) -> SplitTrainer:
    """Return a trainer of this rank for the paced model."""
    config = SubBatch(workers=group.world_size, activations=codec, activation_gradients=codec)
    pace = _Board(32 if codec is None else 8, group.world_size)
    head = [_layer(row, group) for row in network.CONNECTED]
    return paced_trainer(group, config, pace, paced_body(), head, network.BATCH)


def text(figures: dict[str, Any]) -> str:
    """Return the table of speed-ups."""
    lines = []
    for bits, printed in _PRINTED.items():
        ours, planned = figures["speedups"][str(bits)], figures["planned"][str(bits)]
        plans = f"{planned['table 3']:.2f}", f"{planned['machine']:.2f}"
        errors = f"{ours['median'] / printed - 1:+.1%}", f"{figures['late'][str(bits)]:.1%}"
        lines.append((f"{bits}-bit", f"{printed}", *plans, shown(ours, digits=2), *errors))
    head = ("", "printed", "planned, Table 3", "planned", "rehearsed", "of printed", "late")
    title = f"Speed-ups of four GPUs, {network.BATCH} images each; {figures['slower']:g}"
    alone = shown(figures["alone_s"], 1e3 / figures["slower"], 1)
    tables = table(f"{title} times slower", head, lines)
    return f"{tables}\n\nOne GPU: {alone} ms a step, paced (104.1 printed)."
