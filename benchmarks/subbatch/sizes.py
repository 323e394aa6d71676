"""Compare speed-ups of 96 GPUs by sub-batch size with table 7 of Dettmers 2016 (section 5.2).

Four ranks emulate the GPUs. The strategy's real step runs over gloo, with the sub-batch sizes of
table 7. Convolutions sleep for table 4's times; `machines/infiniband-96gpu.toml` gives the times of
the head's products and of exchanges. A rank sends as many activations as one of 96 GPUs: 3072 / 4
outputs for four GPUs' rows, not 3072 / 96 outputs for all rows. All times are `SLOWER` times
longer, so that loopback keeps up.
"""

from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from paced_thread import HEADER, paced_trainer
from rehearsed import SLOWER, loaded, paced_body
from torch import Tensor

from figures import shown, spread, table
from paceline.core.cost import Rate, Roofline, compute_lane
from paceline.core.workload import Layer
from paceline.links.group import Group
from paceline.records.machine_file import find_machine
from paceline.strategies.subbatch.config import SubBatch
from paceline.strategies.subbatch.head import layer_work, matrix_of, num_outputs
from paceline.strategies.subbatch.paced import PacedHeadLayer
from paceline.strategies.subbatch.trainer import SplitTrainer
from paceline.training.models.sharded import Sharding
from papers.dettmers8bit_planned import (
    BATCH,
    CONVOLUTIONS,
    GPUS,
    TOTAL_MS,
    planned,
    priced_alexnet,
)
from papers.paper_tables import printed_values
from ranks import Variant, alternate, on_ranks, timed

_RANKS = 4
_SIZES, _QUICK_SIZES = (128, 256, 512, 1024, 2048, 12288), (1024, 12288)
_MACHINE = "infiniband-96gpu"
_SAMPLES = GPUS * BATCH
# A rank has 96 samples, because the smallest sub-batch needs 96 passes; a sample counts as
# 128 / 96 images.
_OWN = GPUS
_IMAGES = BATCH / _OWN
_CODECS = {32: None, 8: "dynamic8"}


def part(quick: bool) -> dict[str, Any]:
    """Return the printed, planned and rehearsed speed-ups."""
    figures = on_ranks(Path(__file__).parent, "sizes", _RANKS, quick)
    printed = printed_values("dettmers8bit", "table 7, planned")
    cases = {name: case for name, case in _cases(quick).items() if name in figures["speedups"]}
    figures["printed"] = {name: printed["speedup", *case] for name, case in cases.items()}
    figures["planned"] = {name: planned(*case).speedup for name, case in cases.items()}
    return figures


def _cases(quick: bool) -> dict[str, tuple[int, int]]:
    """Return sub-batch sizes and bits by name."""
    sizes = _QUICK_SIZES if quick else _SIZES
    return {f"{size}, {bits}-bit": (size, bits) for size in sizes for bits in _CODECS}


def measure(group: Group, quick: bool) -> dict[str, Any]:
    """Return speed-ups by sub-batch size and bits, and the lateness of the paced links."""
    trainers = {
        name: _together(group, size, _CODECS[bits]) for name, (size, bits) in _cases(quick).items()
    }
    steps = {name: partial(one.step, loaded(_OWN)) for name, one in trainers.items()}
    variants = [Variant(name, timed(step), group.world_size) for name, step in steps.items()]
    found = alternate(variants, group, 2 if quick else 3, 1)
    late = {name: max(group.gather(one.thread.late)) for name, one in trainers.items()}
    for one in trainers.values():
        one.close()
    once_s = 1e-3 * SLOWER * TOTAL_MS
    seconds = {name: list(chain.from_iterable(times)) for name, times in found.items()}
    return {
        "slower": SLOWER,
        "step_s": {name: median(times) for name, times in seconds.items()},
        "speedups": {
            name: spread([GPUS * once_s / one for one in times]) for name, times in seconds.items()
        },
        "late": late,
    }


class _Cluster:
    """The `Pace` of 96 GPUs; each sends to all others, one message after another.

    Messages last as long as the plan's ring. An 8-bit exchange includes the codec's time.
    """

    def __init__(self, codec: str | None, num_ranks: int) -> None:
        machine = find_machine(_MACHINE).for_workers(GPUS)
        devices = machine.devices
        links = [hop.link for hop in machine.route(devices[0], devices[len(devices) // 2])]
        self._latency_s = sum(link.latency_s for link in links)
        self._nbytes_per_s = min(link.bandwidth_bytes_per_s for link in links)
        self._speed = None if codec is None else devices[0].codecs["eightbit"]
        self._peers = num_ranks - 1

    def __call__(self, values: Tensor, head: int, rest: int) -> float:
        """Return the seconds of an exchange."""
        if not head and not rest:  # weight gradients are sent twice: raw, and summed
            return 2 * self._messages_s(values.nbytes / GPUS)
        nbytes = _IMAGES * ((head or rest) / self._peers - HEADER)
        if self._speed is None or not head:
            return self._messages_s(nbytes)
        # A GPU encodes its own values and decodes all GPUs' values, or the reverse.
        codec_s = 2 * self._speed.latency_s + GPUS * nbytes / self._speed.decode_values_per_s
        return self._messages_s(nbytes) + SLOWER * codec_s

    def _messages_s(self, nbytes: float) -> float:
        return SLOWER * (GPUS - 1) * (self._latency_s + nbytes / self._nbytes_per_s)


def _together(group: Group, size: int, codec: str | None) -> SplitTrainer:
    """Return a trainer of this rank for sub-batches of `size` samples of all 96 GPUs."""
    num_passes, workers = _SAMPLES // size, group.world_size
    config = SubBatch(*(workers, None, codec, codec), sub_batch=workers * _OWN // num_passes)
    assert config.num_sub_batches(_OWN) == num_passes
    pace = _Cluster(codec, workers)
    return paced_trainer(group, config, pace, paced_body(), _layers(group), _OWN)


def _layers(group: Group) -> list[PacedHeadLayer]:
    """Return layers paced as 1/96 of their outputs for the rows of all GPUs."""
    machine = find_machine(_MACHINE)
    rate = Roofline.of(machine).rates[compute_lane(machine.devices[0].name)]
    rows_ratio = _IMAGES * GPUS / group.world_size
    made = []
    for layer in priced_alexnet().layers[len(CONVOLUTIONS) :]:
        matrix, outputs = matrix_of(layer), num_outputs(layer)
        sharding = Sharding.even(outputs, group.world_size)
        times = partial(_seconds, rate, layer, rows_ratio)
        made.append(PacedHeadLayer(layer.name, matrix.shape[1], sharding, group.rank, times))
    return made


def _seconds(
    rate: Rate, layer: Layer, rows_ratio: float, number: int, rows: int
) -> tuple[float, float, float]:
    outputs = num_outputs(layer)
    share = -(-outputs // GPUS) / outputs
    work = layer_work(layer, share, rows_ratio * rows / BATCH, accumulates=number > 0)
    forward_s, input_s, weight_s = (
        0.0 if cost is None else SLOWER * (rate.work_s(cost) + rate.latency_s(cost))
        for cost in work
    )
    return forward_s, input_s, weight_s


def text(figures: dict[str, Any]) -> str:
    """Return the table of speed-ups."""
    lines = []
    for name, ours in figures["speedups"].items():
        plan, printed = figures["planned"][name], figures["printed"][name]
        row = (f"{printed:g}", f"{plan:.1f}", shown(ours, digits=1))
        error = f"{plan / ours['median'] - 1:+.1%}"
        lines.append((name, *row, error, f"{figures['late'][name]:.1%}"))
    head = ("sub-batch", "printed", "planned", "rehearsed", "planned by rehearsed", "late")
    title = f"Speed-ups of 96 GPUs by sub-batch size, {figures['slower']:g} times slower"
    return table(title, head, lines)
