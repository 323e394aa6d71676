"""Profile a device of an asynchronous run, and its link to the hub, as a record to send."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

import torch
from pydantic import FailFast, Field

from paceline.core.machine import DeviceKind
from paceline.core.plan import Kind
from paceline.core.settings import Record
from paceline.core.timeline import Span
from paceline.core.wire_format import Kernel, wire_format
from paceline.links.devices import device_of
from paceline.links.group import boot_id
from paceline.measure import timing
from paceline.measure.cores import MIN_SECONDS, CoreTime, cores_here, lost_here
from paceline.measure.devices import codec_speed, copy_speed

# A time is at most a century.
Seconds = Annotated[float, Field(ge=0, le=3.2e9, allow_inf_nan=False)]
PerSecond = Annotated[float, Field(gt=0, le=1e30, allow_inf_nan=False)]
_NUM_WARM_UP, _MAX_ROUNDS, _NUM_PINGS = 2, 200, 20
_NETWORK = Path("/proc/self/ns/net")
_MOST_PARTS = 100_000  # limit of the entries in `seconds`
_MOST_BELOW = 1000  # limit of the profiles in `below`


class HubLink(Record):
    """The speed of a worker's link to its hub.

    `latency_s`: seconds that a small message takes. `bytes_per_s`: speed of a large message.
    `core_bytes_per_s`: bytes per second that one core of the worker sends or receives.
    `lost_beside`: share of speed that computation loses while messages use the same cores.
    """

    latency_s: Seconds
    bytes_per_s: PerSecond
    core_bytes_per_s: PerSecond
    lost_beside: Annotated[float, Field(ge=0, lt=1)] = 0.0


class DeviceProfile(Record):
    """The speed of a device and, for a worker, of its link to the hub.

    `host`: identity of the host and its network namespace. `seconds`: kind, layer and duration of
    each part of a step. `codecs`: for each kernel, the values per second that the device encodes
    and decodes. `running`: share of the step time in which the device had a core; below 1 if
    devices outnumber cores. `unrest`: relative spread of the step times (`unrest_between`).
    `copy_bytes_per_s`: speed of copies from a GPU to its host. `below`: in the profile of a hub
    that is itself a worker, the profiles of the hub's workers.
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
        """Return this profile with the measured link to the hub.

        `ask(n, m)` sends n bytes to the hub and receives m bytes.
        """
        small_s = min(timing.median_s(lambda: ask(1, 1), num_rounds=1) for _ in range(_NUM_PINGS))
        large = CoreTime(lambda: ask(nbytes, nbytes))
        large_s = timing.median_s(large)
        link = HubLink(
            latency_s=small_s / 2,
            bytes_per_s=2 * nbytes / max(large_s - small_s, MIN_SECONDS),
            core_bytes_per_s=2 * nbytes / max(large.busy_s, MIN_SECONDS),
            lost_beside=lost_here(large.num_cores, 1) if self.kind is DeviceKind.CPU else 0.0,
        )
        return self.model_copy(update={"link": link})


def profile_device(
    device: torch.device,
    codecs: Iterable[str],
    run_step: Callable[[int], None],
    spans: list[Span],
    seconds: float,
) -> DeviceProfile:
    """Profile a device by running steps for about `seconds`, at least three steps.

    `run_step(number)` runs a step on the device and appends its spans to `spans`.
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
        host=f"{boot_id()} {_NETWORK.readlink()}",  # each container network counts as a host
        seconds=tuple((*key, value) for key, value in medians.items()),
        # Codecs are measured on the CPU, and assumed to be equally fast on a GPU.
        codecs={wire_format(name).kernel: codec_speed(name) for name in set(codecs)},
        cores=cores_here(),
        running=min(1.0, busy_s / max(elapsed_s, MIN_SECONDS)),
        unrest=timing.unrest_of_traced(spans),
        copy_bytes_per_s=None if device.type == "cpu" else copy_speed(device),
    )
