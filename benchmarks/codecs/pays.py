"""Draw planned and measured step times by link rate, with and without codecs."""

import math
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import svg
from paceline.core.machine import Machine
from paceline.core.workload import Workload
from paceline.planner import forecast
from paceline.planner.device_speed import DeviceRate, calibrated
from paceline.records.machine_file import read_machine
from paceline.strategies import find_exchange
from paceline.strategies.allreduce.config import AllReduce
from paceline.training.recipes.named import workload_of

_HERE = Path(__file__).parent
_MACHINE = _HERE.parents[1] / "machines" / "two-hosts-gigabit.toml"
_BATCH_SIZE, _WORKERS = 16, 2
_PAYLOAD = 1448 / 1514  # TCP payload per byte of a frame; machine files count payload
_MBIT = 1e6 / 8
_SWEEP = [_MBIT * 50 * 2 ** (i / 4) for i in range(37)]  # 50 Mbit/s to 25 Gbit/s
_MEASURED_AT = {"100mbit": 100 * _MBIT, "1gbit": 1000 * _MBIT}
# Planned variants, and the plan's codec. Our 16-bit casts are faster than torch's hook.
_PLANNED = {
    "DDP 25 MB": "none",
    "DDP 25 MB, fp16_compress_hook": "half",
    "dynamic8": "dynamic8",
    "e3m0": "e3m0",
}
_CODECS = {
    "none": ("#8b95a1", "DDP 25 MB", "torch's DDP"),
    "half": ("#e8a33d", "DDP 25 MB, fp16_compress_hook", "16 bits"),
    "dynamic8": ("#3f7fbf", "dynamic8", "dynamic8"),
}
_WIDTH, _HEIGHT = 900, 480
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 790, 60, 420
_LOOPBACK = 845  # x of the points of loopback, whose rate depends on the processors
_SECONDS = (0.5, 32.0)


def planned(workload: Workload, machine: Machine, codec: str, nbytes_per_s: float) -> float:
    """Plan a step with a codec at this link rate; return its seconds."""
    linked = machine.with_each("links", bandwidth_bytes_per_s=nbytes_per_s)
    config = AllReduce(workers=_WORKERS, codec=None if codec == "none" else codec)
    samples = _BATCH_SIZE * _WORKERS
    return forecast(workload, linked, find_exchange("allreduce"), config, samples).step_s


def planned_s(rate: str, variants: Mapping[str, Any]) -> dict[str, float]:
    """Return the planned step seconds of the measured variants that can be planned.

    The planned devices compute as fast as the measured ranks without exchange. Empty for loopback.
    """
    if rate not in _MEASURED_AT:
        return {}
    workload = workload_of("alexnet", _BATCH_SIZE, None)
    machine = _as_fast(variants["apart"]["seconds"]["median"])
    nbytes_per_s = _MEASURED_AT[rate] * _PAYLOAD
    return {
        variant: planned(workload, machine, codec, nbytes_per_s)
        for variant, codec in _PLANNED.items()
        if variant in variants
    }


def _as_fast(seconds: float) -> Machine:
    """Calibrate the machine, so that a step without exchange takes these seconds."""
    rate = DeviceRate(_BATCH_SIZE / seconds, _BATCH_SIZE)
    return calibrated(read_machine(_MACHINE), partial(workload_of, "alexnet"), rate, _BATCH_SIZE)


def drawn(figures: Mapping[str, Any]) -> str:
    """Return the SVG: lines are planned, dots are measured."""
    return "\n".join(_lines(figures)) + "\n"


def _lines(figures: Mapping[str, Any]) -> Iterator[str]:
    workload = workload_of("alexnet", _BATCH_SIZE, None)
    alone = figures["1gbit"]["variants"]["apart"]["seconds"]["median"]
    machine = _as_fast(alone)
    yield svg.opening(_WIDTH, _HEIGHT)
    yield svg.text(_LEFT, 24, "AlexNet, 16 images on each of two machines: seconds a step")
    yield from _grid()
    height = _height(alone)
    yield svg.path([(_LEFT, height), (_RIGHT, height)], 'stroke="#222" stroke-dasharray="4 4"')
    yield svg.text(_LEFT + 6, height + 16, "computing alone", 'font-size="12" fill="#222"')
    for row, (codec, (colour, variant, name)) in enumerate(_CODECS.items()):
        points = [
            (_place(rate), _height(planned(workload, machine, codec, rate * _PAYLOAD)))
            for rate in _SWEEP
        ]
        yield svg.path(points, f'stroke="{colour}" stroke-width="2"')
        yield svg.box(_RIGHT - 190, _TOP + 22 * row, 14, 14, colour)
        yield svg.text(_RIGHT - 170, _TOP + 12 + 22 * row, name)
        places = {rate: _place(nbytes_per_s) for rate, nbytes_per_s in _MEASURED_AT.items()}
        for rate, left in (places | {"loopback": _LOOPBACK}).items():
            yield from _dot(left, figures[rate]["variants"][variant]["seconds"], colour)
    yield "</svg>"


def _dot(left: float, figure: Mapping[str, float], colour: str) -> Iterator[str]:
    low, high = (_height(figure[name]) for name in ("quartile1", "quartile3"))
    yield svg.path([(left, low), (left, high)], f'stroke="{colour}" stroke-width="5"')
    middle = _height(figure["median"])
    yield f'<circle cx="{left:.1f}" cy="{middle:.1f}" r="6" fill="{colour}" stroke="white"/>'


def _grid() -> Iterator[str]:
    for gbit in (0.1, 1, 10):
        left = _place(gbit * 1000 * _MBIT)
        yield svg.path([(left, _TOP), (left, _BOTTOM)], 'stroke="#ddd"')
        said = f"{gbit:g} Gbit/s" if gbit >= 1 else "100 Mbit/s"
        yield svg.text(left, _BOTTOM + 20, said, 'text-anchor="middle" font-size="12"')
    for power in range(-1, 6):
        height = _height(2.0**power)
        yield svg.path([(_LEFT, height), (_RIGHT, height)], 'stroke="#ddd"')
        label = f"{2.0**power:g} s"
        yield svg.text(_LEFT - 8, height + 4, label, 'text-anchor="end" font-size="12"')
    yield svg.text(_LOOPBACK, _BOTTOM + 20, "loopback", 'text-anchor="middle" font-size="12"')
    said = "lines: planned; dots: measured, with quartiles"
    yield svg.text(_LEFT, _BOTTOM + 44, said, 'font-size="12" fill="#555"')


def _place(nbytes_per_s: float) -> float:
    share = math.log(nbytes_per_s / _SWEEP[0]) / math.log(_SWEEP[-1] / _SWEEP[0])
    return _LEFT + (_RIGHT - _LEFT) * share


def _height(seconds: float) -> float:
    share = math.log(seconds / _SECONDS[0]) / math.log(_SECONDS[1] / _SECONDS[0])
    return _BOTTOM - (_BOTTOM - _TOP) * share
