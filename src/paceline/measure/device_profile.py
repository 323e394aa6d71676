"""Profile a device of an asynchronous run, and its link to the hub; the record travels."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

import torch
from pydantic import FailFast, Field

from paceline.core.machine import DeviceKind
from paceline.core.peer_records import PerSecond, Seconds
from paceline.core.plan import Kind
from paceline.core.settings import Record
from paceline.core.timeline import Span
from paceline.core.wire_format import Kernel, wire_format
from paceline.links.devices import device_of
from paceline.links.group import boot_id
from paceline.measure import timing
from paceline.measure.cores import cores_here
from paceline.measure.devices import codec_speed, copy_speed
from paceline.measure.link import HubLink, hub_link
from paceline.measure.unrest import unrest_of_traced

MIN_SECONDS = 1e-9
_NUM_WARM_UP, _MAX_ROUNDS = 2, 200
_NETWORK = Path("/proc/self/ns/net")
_MOST_PARTS = 100_000  # of a step, forward and backward
_MOST_BELOW = 1000  # devices of a child hub


class DeviceProfile(Record):
    """The speed of a device and, for a worker's, of its link to the hub.

    `host` tells its network from others, and it may use `cores` of it. `seconds` are those of each
    part of a step, by kind and layer, of which it was `running` on a core for a share: with fewer
    cores than devices it waits for one. `unrest` is that of `core.losses`. `codecs` are values a
    second encoded and decoded, by kernel. A GPU copies `copy_bytes_per_s` to its host. `below`: for
    a hub that is a worker of another, the profiles of its own workers' devices.
    """

    kind: DeviceKind
    host: Annotated[str, Field(max_length=200)]
    seconds: Annotated[
        tuple[tuple[Kind, str, Seconds], ...], FailFast(), Field(max_length=_MOST_PARTS)
    ]
    codecs: dict[Kernel, tuple[PerSecond, PerSecond]]
    cores: Annotated[int, Field(ge=1, le=1 << 16)] = 1
    running: Annotated[float, Field(ge=0, le=1)] = 1.0
    unrest: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    copy_bytes_per_s: PerSecond | None = None
    link: HubLink | None = None
    below: Annotated[tuple["DeviceProfile", ...], Field(max_length=_MOST_BELOW)] = ()

    def with_link(self, ask: Callable[[int, int], None], nbytes: int) -> "DeviceProfile":
        """Measure the link to the hub, over which `ask` sends and gets so many bytes."""
        link = hub_link(ask, nbytes, on_cores=self.kind is DeviceKind.CPU)
        return self.model_copy(update={"link": link})


def profile_device(
    device: torch.device,
    codecs: Iterable[str],
    run_step: Callable[[int], None],
    spans: list[Span],
    seconds: float,
) -> DeviceProfile:
    """Return the profile of a device on which `run_step` takes a step and leaves its spans.

    It is called with numbers from 0 up for about `seconds`, three times at least.
    """
    for number in range(_NUM_WARM_UP):
        run_step(number)
    spans.clear()
    started_s, busy_s = time.monotonic(), time.thread_time()
    for number in range(_MAX_ROUNDS):
        if number >= timing.FEWEST_ROUNDS and time.monotonic() > started_s + seconds:
            break
        run_step(_NUM_WARM_UP + number)
    busy_s, elapsed_s = time.thread_time() - busy_s, time.monotonic() - started_s
    medians = timing.median_durations(spans, lambda span: (span.kind, span.part))
    return DeviceProfile(
        kind=device_of(device).kind,
        host=f"{boot_id()} {_NETWORK.readlink()}",  # containers of one kernel have own networks
        seconds=tuple((*key, value) for key, value in medians.items()),
        # Measured on the CPU; a GPU's count as equally fast.
        codecs={wire_format(name).kernel: codec_speed(name) for name in set(codecs)},
        cores=cores_here(),
        running=min(1.0, busy_s / max(elapsed_s, MIN_SECONDS)),
        unrest=unrest_of_traced(spans),
        copy_bytes_per_s=None if device.type == "cpu" else copy_speed(device),
    )
