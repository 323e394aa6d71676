"""What a plan has to know of a device and of its way to the hub, measured before the first step."""

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from paceline.codecs.names import find_codec
from paceline.core.errors import InvalidInput
from paceline.core.plan import Kind
from paceline.core.timeline import Span
from paceline.core.wire_format import Kernel, wire_format
from paceline.strategies.wheel.coding import codecs_of
from paceline.strategies.wheel.config import Wheel

_NUM_WARM_UP, _FEWEST, _MOST = 2, 3, 200
_NUM_PINGS = 20
_NUM_LARGE = 3
_CODEC_VALUES = 1 << 18
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")


class Profile(BaseModel):
    """A device, and its way to the hub if it is a body worker's. `host` tells its network.

    `seconds` are those of each part of a step, by kind and layer; `codecs` are values a second
    encoded and decoded, by kernel. A GPU copies `copy_bytes_per_s` to its host.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["cpu", "gpu"]
    host: str
    seconds: tuple[tuple[Kind, str, float], ...]
    codecs: dict[Kernel, tuple[float, float]]
    copy_bytes_per_s: float | None = None
    latency_s: float = 0.0
    link_bytes_per_s: float = 0.0

    @classmethod
    def of(cls, data: bytes) -> "Profile":
        """Return the profile of these bytes; InvalidInput if they are none."""
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise InvalidInput(f"a profile with {error.error_count()} faults") from None


def boot_id() -> str:
    """Return what tells this kernel, and its clock, from others."""
    return _BOOT_ID.read_text().strip()


def _host() -> str:
    """Return what tells this network from that of other machines, and of containers on this one."""
    return f"{boot_id()} {_NETWORK.readlink()}"


def profiled(
    device: torch.device,
    config: Wheel,
    rounds: Callable[[int], None],
    spans: list[Span],
    seconds: float,
) -> Profile:
    """Return the profile of a device on which `rounds` takes a step and leaves its spans.

    It is called with numbers from 0 up for about `seconds`, three times at least.
    """
    for number in range(_NUM_WARM_UP):
        rounds(number)
    spans.clear()
    until_s = time.monotonic() + seconds
    for number in range(_MOST):
        rounds(_NUM_WARM_UP + number)
        if number + 1 >= _FEWEST and time.monotonic() > until_s:
            break
    return Profile(
        kind="cpu" if device.type == "cpu" else "gpu",
        host=_host(),
        seconds=tuple((*key, value) for key, value in _medians(spans).items()),
        codecs=_codec_speeds(config),
        copy_bytes_per_s=None if device.type == "cpu" else _copy_speed(device),
    )


def with_link(profile: Profile, ask: Callable[[int, int], None], nbytes: int) -> Profile:
    """Return the profile with its way to the hub, over which `ask` sends and gets so many bytes."""
    small_s = min(_timed(lambda: ask(1, 1)) for _ in range(_NUM_PINGS))
    large_s = median(_timed(lambda: ask(nbytes, nbytes)) for _ in range(_NUM_LARGE))
    pace = 2 * nbytes / max(large_s - small_s, 1e-9)
    update = {"latency_s": small_s / 2, "link_bytes_per_s": pace}
    return profile.model_copy(update=update)


def _medians(spans: Iterable[Span]) -> dict[tuple[Kind, str], float]:
    found: dict[tuple[Kind, str], list[float]] = defaultdict(list)
    for span in spans:
        found[span.kind, span.part].append(span.duration_s)
    return {key: median(values) for key, values in found.items()}


def _codec_speeds(config: Wheel) -> dict[Kernel, tuple[float, float]]:
    """Return how fast the CPU is with the codecs of a run; a GPU's values are encoded there too."""
    names = {codec for codec in codecs_of(config).values() if codec is not None}
    return {wire_format(name).kernel: _codec_speed(name) for name in names}


def _codec_speed(name: str) -> tuple[float, float]:
    codec, values = find_codec(name), torch.randn(_CODEC_VALUES)
    payload = codec.encode(values)
    encode_s = median(_timed(lambda: codec.encode(values)) for _ in range(_FEWEST))
    decode_s = median(_timed(lambda: codec.decode(payload)) for _ in range(_FEWEST))
    return _CODEC_VALUES / encode_s, _CODEC_VALUES / decode_s


def _copy_speed(device: torch.device) -> float:
    values = torch.zeros(1 << 22, device=device)
    values.cpu()
    nbytes = values.numel() * values.element_size()
    return nbytes / median(_timed(lambda: values.cpu()) for _ in range(_FEWEST))


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def memory_bytes() -> int:
    """Return the memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
