"""Draw a predicted step of each strategy, for docs/strategies."""

import sys
from typing import NamedTuple

import lanes
from paceline.planner import Forecast, forecast
from paceline.planner.drawing import some_step
from paceline.records.machine_file import find_machine
from paceline.strategies import STRATEGIES
from paceline.training.recipes.named import workload_of


class Scene(NamedTuple):
    """A picture of a strategy on a machine from machines/, with the lanes to draw."""

    strategy: str
    machine: str
    workers: int
    batch_size: int  # per worker
    lanes: tuple[str, ...]
    devices: tuple[str, ...] = ()  # the workers' devices; by default the machine's first devices
    sync_every: int | None = None  # steps per round; the picture shows a whole round


SCENES = (
    Scene(
        "allreduce",
        "two-hosts-gigabit",
        2,
        16,
        ("cpu0/compute", "host0->host1/wire", "cpu1/compute"),
    ),
    Scene(
        "tree",
        "power8-p100",
        4,
        256,
        ("gpu0/compute", "gpu1->gpu0/wire", "gpu0->gpu1/wire", "gpu1/compute"),
    ),
    Scene(
        "host",
        "power8-p100",
        4,
        256,
        ("gpu0/compute", "gpu0/d2h", "power8/reduce", "gpu0/h2d"),
    ),
    Scene(
        "wheel",
        "k40-gigabit",
        4,
        256,
        (
            "gpu1/compute",
            "gpu2/compute",
            "station1->station0/wire",
            "station0->station1/wire",
            "gpu0/compute",
        ),
    ),
    Scene(
        "subbatch",
        "pcie-4gpu",
        4,
        128,
        ("gpu0/compute", "gpu0/exchange", "gpu1/compute"),
    ),
    Scene(
        "hogbatch",
        "p3-16xlarge",
        2,
        1024,
        ("cpu0/compute", "gpu0/compute", "gpu0/h2d", "gpu0/d2h"),
        ("gpu0", "cpu0"),
    ),
    Scene(
        "local",
        "two-hosts-gigabit",
        2,
        16,
        ("cpu0/compute", "host0->host1/wire", "cpu1/compute"),
        sync_every=4,
    ),
    Scene(
        "hierarchy",
        "k40-gigabit",
        4,
        128,
        (
            "gpu0/compute",
            "gpu0/d2h",
            "station0/reduce",
            "station0->station1/wire",
            "gpu0/h2d",
        ),
    ),
)


def predicted(scene: Scene) -> Forecast:
    """Return the forecast of AlexNet for a scene."""
    strategy = STRATEGIES[scene.strategy]
    rounds = {} if scene.sync_every is None else {"sync_every": scene.sync_every}
    config = strategy.config(workers=scene.workers, **rounds)
    workload = workload_of("alexnet", scene.batch_size, None)
    samples = scene.batch_size * scene.workers
    machine = find_machine(scene.machine)
    chosen = sorted(machine.devices, key=lambda device: device.name not in scene.devices)
    machine = machine.model_copy(update={"devices": tuple(chosen)})
    return forecast(workload, machine, strategy, config, samples)


def drawn(scene: Scene) -> str:
    """Return the picture of a scene as SVG."""
    found = predicted(scene)
    title = f"{scene.strategy}: AlexNet on {scene.machine}, {scene.workers} workers, "
    title += f"{1e3 * found.step_s:.4g} ms a step, predicted"
    period_s = found.step_s * (scene.sync_every or 1)
    return lanes.picture(title, _rows(scene, found), *some_step(found.timeline, period_s))


def _rows(scene: Scene, found: Forecast) -> list[lanes.Row]:
    tracks = {str(lane): (str(lane), track) for lane, track in found.timeline.tracks.items()}
    missing = [lane for lane in scene.lanes if lane not in tracks]
    if missing:
        sys.exit(f"{scene.strategy}: no lane {missing[0]!r}; known: {', '.join(tracks)}")
    return [tracks[lane] for lane in scene.lanes]
