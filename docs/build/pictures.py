"""Draw the pictures of plans in docs/images: python docs/build/pictures.py.

A picture shows a predicted step of AlexNet with one strategy: a row per lane, a box per span.
`plan.svg` shows the output of `paceline plan` in a terminal.
"""

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from io import StringIO
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from paceline.core.plan import Kind
from paceline.core.timeline import Span
from paceline.planner import forecast
from paceline.planner.drawing import some_step
from paceline.records.machine_file import find_machine
from paceline.report.figures import KINDS
from paceline.strategies import STRATEGIES
from paceline.training.recipes.named import workload_of

_IMAGES = Path(__file__).parents[1] / "images"
_LEFT, _WIDTH, _ROW, _RIGHT = 190, 900, 26, 10
_SMALL = 'font-size="12" fill="#222"'
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
    return "\n".join(_picture(title, rows, *stretch)) + "\n"


def _picture(
    title: str, rows: Sequence[tuple[str, Sequence[Span]]], start_s: float, end_s: float
) -> Iterator[str]:
    """Yield the lines of an SVG of the lanes from `start_s` to `end_s`."""
    height, wide = _ROW * (len(rows) + 2) + 20, _WIDTH - _LEFT - _RIGHT
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="sans-serif" font-size="14">\n'
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>'
    )
    yield _text(8, 18, title, 'fill="#222"')
    used: set[Kind] = set()
    for number, (lane, spans) in enumerate(rows):
        top = 30 + _ROW * number
        yield _text(8, top + 15, lane)
        yield _box(_LEFT, top, wide, _ROW - 6, 'fill="#f3f5f7"')
        for span in spans:
            left, right = max(span.start_s, start_s), min(span.end_s, end_s)
            if right > left:
                used.add(span.kind)
                scale = wide / (end_s - start_s)
                place, width = _LEFT + (left - start_s) * scale, max((right - left) * scale, 0.6)
                yield _box(place, top, width, _ROW - 6, _look(span.kind))
    top, left = 30 + _ROW * len(rows), float(_LEFT) if len(used) < 8 else 8.0
    for kind in (one for one in Kind if one in used):
        yield _box(left, top + 4, 12, 12, _look(kind))
        yield _text(left + 16, top + 15, KINDS[kind].label)
        left += 34 + 7.2 * len(KINDS[kind].label)
    yield "</svg>"


def _look(kind: Kind) -> str:
    """Return the report's colour for a kind, translucent if the report hatches it."""
    seen = ' fill-opacity="0.5"' if KINDS[kind].hatched else ""
    return f'fill="{KINDS[kind].colour}"{seen}'


def _text(left: float, base: float, content: str, style: str = _SMALL) -> str:
    return f'<text x="{left:.1f}" y="{base:.1f}" {style}>{content}</text>'


def _box(left: float, top: float, width: float, height: float, style: str) -> str:
    sides = f'x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f"<rect {sides} {style}/>"


def terminal() -> str:
    """Run `paceline plan`, and return an SVG of a terminal with its output."""
    found = subprocess.run(  # noqa: S603 - the command above
        [sys.executable, "-m", *_COMMAND.split()], capture_output=True, text=True, check=True
    )
    console = Console(
        record=True, file=StringIO(), width=_CHARACTERS, markup=False, highlight=False, emoji=False
    )
    console.print(f"$ {_COMMAND}")
    console.print(re.sub(" +$", "", found.stdout, flags=re.MULTILINE))
    return _FONTS.sub("", console.export_svg(title="predicted, nothing has run"))


if __name__ == "__main__":
    for scene in SCENES:
        (_IMAGES / f"plan-{scene.strategy}.svg").write_text(drawn(scene))
    (_IMAGES / "plan.svg").write_text(terminal())
