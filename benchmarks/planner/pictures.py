"""Draw a predicted step of each strategy, a row a lane, and the output of `paceline plan`."""

import re
import subprocess
import sys
from io import StringIO
from typing import NamedTuple

from rich.console import Console

import lanes
from paceline.planner import forecast
from paceline.planner.drawing import some_step
from paceline.records.machine_file import find_machine
from paceline.strategies import STRATEGIES
from paceline.training.recipes.named import workload_of

_COMMAND = (
    "paceline plan resnet50 --machine two-laptops-gigabit --batch-size 32 "
    "--strategy allreduce,host,tree"
)
_CHARACTERS = 92  # of a line in the terminal
_FONTS = re.compile(r"@font-face \{.*?\}\n?", re.DOTALL)  # fonts from another website


class Scene(NamedTuple):
    """A picture of a strategy on a machine from machines/, with the lanes to draw."""

    strategy: str
    machine: str
    workers: int
    batch_size: int  # per worker
    lanes: str
    devices: tuple[str, ...] = ()  # the workers' devices; by default the machine's first devices
    sync_every: int | None = None  # steps per round; the picture shows a whole round


_TWO_HOSTS = "cpu0/compute host0->host1/wire cpu1/compute"
_TREE = "gpu0/compute gpu1->gpu0/wire gpu0->gpu1/wire gpu1/compute"
_WHEEL = "gpu1/compute gpu2/compute station1->station0/wire station0->station1/wire gpu0/compute"
_HIERARCHY = "gpu0/compute gpu0/d2h station0/reduce station0->station1/wire gpu0/h2d"
_HOGBATCH = "cpu0/compute gpu0/compute gpu0/h2d gpu0/d2h"
SCENES = (
    Scene("allreduce", "two-hosts-gigabit", 2, 16, _TWO_HOSTS),
    Scene("tree", "power8-p100", 4, 256, _TREE),
    Scene("host", "power8-p100", 4, 256, "gpu0/compute gpu0/d2h power8/reduce gpu0/h2d"),
    Scene("wheel", "k40-gigabit", 4, 256, _WHEEL),
    Scene("subbatch", "pcie-4gpu", 4, 128, "gpu0/compute gpu0/exchange gpu1/compute"),
    Scene("hogbatch", "p3-16xlarge", 2, 1024, _HOGBATCH, devices=("gpu0", "cpu0")),
    Scene("local", "two-hosts-gigabit", 2, 16, _TWO_HOSTS, sync_every=4),
    Scene("hierarchy", "k40-gigabit", 4, 128, _HIERARCHY),
)


def drawn(scene: Scene) -> str:
    """Return a predicted step of AlexNet as SVG, with title and legend."""
    strategy, machine = STRATEGIES[scene.strategy], find_machine(scene.machine)
    rounds = {} if scene.sync_every is None else {"sync_every": scene.sync_every}
    config = strategy.config(workers=scene.workers, **rounds)
    chosen = sorted(machine.devices, key=lambda device: device.name not in scene.devices)
    machine = machine.model_copy(update={"devices": tuple(chosen)})
    workload = workload_of("alexnet", scene.batch_size, None)
    found = forecast(workload, machine, strategy, config, scene.batch_size * scene.workers)
    title = f"{scene.strategy}: AlexNet on {scene.machine}, {scene.workers} workers, "
    title += f"{1e3 * found.step_s:.4g} ms a step, predicted"
    tracks = {str(lane): track for lane, track in found.timeline.tracks.items()}
    rows = [(lane, tracks[lane]) for lane in scene.lanes.split()]
    stretch = some_step(found.timeline, found.step_s * (scene.sync_every or 1))
    return lanes.picture(title, rows, *stretch)


def terminal() -> str:
    """Run `paceline plan`, and return an SVG of a terminal with its output."""
    found = subprocess.run(
        [sys.executable, "-m", *_COMMAND.split()], capture_output=True, text=True, check=True
    )
    console = Console(
        record=True, file=StringIO(), width=_CHARACTERS, markup=False, highlight=False, emoji=False
    )
    console.print(f"$ {_COMMAND}")
    console.print(re.sub(" +$", "", found.stdout, flags=re.MULTILINE))
    return _FONTS.sub("", console.export_svg(title="predicted, nothing has run"))
