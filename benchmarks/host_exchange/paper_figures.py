"""Figures 2, 4 and 5 of Le et al. 2018, from our own plans, rehearsals and a training.

*Predicted* are plans for the machine of machines/power8-p100.toml. *Rehearsed* are the sweep and
the search of part chunks: four ranks on two cores whose layers take a P100's time, and whose
exchange is real. *Measured* is LeNet-5 on digits, trained with both exchanges: ImageNet is not.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import curves
from command import paceline
from curves import COLOURS, Curve
from figures import table
from paceline.core.chunks import RuntimeSearch
from paceline.planner import Forecast, forecast
from paceline.records.machine_file import find_machine
from paceline.strategies import STRATEGIES
from papers.networks import step_of

_MACHINE, _WORKERS, _INTERVAL = "power8-p100", 4, 10  # iterations, as in the paper
_DASHED = ' stroke-dasharray="5 4"'
_BASELINES = {"tree": "tree (the paper's TypDP)", "one": "one GPU"}
_CHUNKS = (*range(1, 10), *range(10, 101, 5))
_ITERATIONS, _TESTS, _TEST_S = 21_000, 21, 14.7  # of figure 4: section 5.2.5
_EVALUATED = 10  # iterations between two tests of the training
_SEARCHED = 200  # iterations that figure 5 shows
_SEARCHES = ((5, 5), (10, 5), (15, 5), (5, 10), (5, 15))  # step and range


def planned(model: str, batch_size: int, strategy: str, workers: int, **options: Any) -> Forecast:
    """Return the forecast of a step on the paper's machine; `batch_size` is that of a GPU."""
    chosen = STRATEGIES[strategy]
    config = chosen.config(workers=workers, **options)
    workload = step_of(model, batch_size)
    return forecast(workload, find_machine(_MACHINE), chosen, config, batch_size * workers)


@cache
def step_s(batch_size: int, strategy: str, workers: int = _WORKERS, chunk: int = 1) -> float:
    """Return the predicted seconds of ResNet-152's step."""
    options = {"chunk": chunk} if strategy == "host" else {}
    return planned("resnet152", batch_size, strategy, workers, **options).step_s


def baselines(batch_size: int, ends: tuple[float, float], unit: float) -> Iterator[Curve]:
    """Yield the lines of the tree and of one GPU."""
    values = {"tree": step_s(batch_size, "tree"), "one": step_s(batch_size, "host", 1)}
    for colour, (name, seconds) in zip(("#888", "#222"), values.items(), strict=True):
        points = [(end, unit * seconds) for end in ends]
        yield Curve(_BASELINES[name], points, colour, dashes=_DASHED)


def figure_2(by_ranks: Mapping[str, Any]) -> str:
    """Return the seconds of ten iterations of ResNet-152 by chunk size, 16 images a GPU."""
    found = [(float(n), _INTERVAL * step_s(16, "host", chunk=n)) for n in _CHUNKS]
    shown = [
        (float(n), _INTERVAL * row["median"])
        for n, row in by_ranks["4 ranks"]["sweep"].items()
        if int(n) <= _CHUNKS[-1]
    ]
    drawn = [
        Curve("host, predicted", found, COLOURS[0]),
        *baselines(16, (_CHUNKS[0], _CHUNKS[-1]), _INTERVAL),
        Curve("host, rehearsed here, 12 images", shown, COLOURS[1], is_dots=True),
    ]
    title = "Figure 2: ten iterations of ResNet-152 by chunk size, 4 GPUs; lines: predicted"
    return curves.picture(title, "layers of a chunk", "seconds", drawn, from_zero=False)


def figure_4a(_: Mapping[str, Any]) -> str:
    """Return the minutes of AlexNet's 21,000 iterations and 21 tests, as predicted."""
    drawn = []
    for colour, name in zip(COLOURS, ("host", "tree"), strict=False):
        seconds = planned("alexnet", 256, name, _WORKERS).step_s
        points = [
            (i * (seconds * _ITERATIONS / _TESTS + _TEST_S) / 60, i * _ITERATIONS / _TESTS)
            for i in range(_TESTS + 1)
        ]
        drawn.append(Curve(f"{name}: {points[-1][0]:.0f} minutes", points, colour))
    title = "Figure 4a: AlexNet, 21,000 iterations and 21 tests on 4 GPUs; predicted"
    return curves.picture(title, "minutes", "iterations", drawn, from_zero=True)


def measure(quick: bool) -> dict[str, list[curves.Point]]:
    """Return the iterations of a training's tests, and the % of accuracy, with both exchanges."""
    words = ("train", "lenet5", "--workers", 2, "--epochs", 2 if quick else 10)
    tested = ("--evaluate-every", _EVALUATED, "--profile-s", 0.5)
    found = {
        name: paceline(*words, *tested, "--strategy", name)["evaluations"]
        for name in ("host", "tree")
    }
    return {
        name: [(one["num_steps"], 100 * (one["score"] or 0.0)) for one in own]
        for name, own in found.items()
    }


def text(figures: Mapping[str, Any]) -> str:
    """Return the table of the last accuracies."""
    lines = [
        (name, f"{points[-1][0]:,}", f"{points[-1][1]:.1f}") for name, points in figures.items()
    ]
    return table("", ("exchange", "iterations", "% of the test samples"), lines)


def figure_4b(figures: Mapping[str, Any]) -> str:
    """Return the accuracy of LeNet-5 on digits by iteration, measured with both exchanges."""
    drawn = [
        Curve(f"{name}, measured", points, colour, is_dots=name == "tree")
        for colour, (name, points) in zip(COLOURS, figures.items(), strict=False)
    ]
    title = "Figure 4b: accuracy by iteration, LeNet-5 on digits, 2 workers on cores; measured"
    return curves.picture(title, "iterations", "% of the test samples", drawn, from_zero=False)


def figure_5(by_ranks: Mapping[str, Any]) -> str:
    """Return the seconds of each ten iterations while Algorithm 1 looks for a chunk."""
    layers = len(step_of("resnet152", 12).layers)
    colours, drawn = iter(COLOURS), []
    for step, range_ in _SEARCHES:
        search = RuntimeSearch(layers, step, range_, interval=1)
        points = []
        for iteration in range(_INTERVAL, _SEARCHED + 1, _INTERVAL):
            seconds = step_s(12, "host", chunk=search.chunk)
            points.append((float(iteration), _INTERVAL * seconds))
            search.record(seconds)
        name = f"step {step}, range {range_}: chunk {search.chunk}"
        drawn.append(Curve(name if search.done else f"{name}, so far", points, next(colours)))
    trials = by_ranks["4 ranks"]["searches"]["Algorithm 1 (step 5, range 5)"]["trials"]
    shown = [
        (float(_INTERVAL * (i + 1)), _INTERVAL * trial["measured_s"])
        for i, trial in enumerate(trials)
        if _INTERVAL * (i + 1) <= _SEARCHED
    ]
    first = (_SEARCHED, _INTERVAL * step_s(12, "host"))
    drawn += [
        Curve("chunks of 1", [(_INTERVAL, first[1]), first], "#d55e00", dashes=_DASHED),
        *baselines(12, (_INTERVAL, _SEARCHED), _INTERVAL),
        Curve("step 5, range 5, rehearsed here", shown, COLOURS[1], is_dots=True),
    ]
    title = "Figure 5: Algorithm 1, ResNet-152, 12 images on each of 4 GPUs; lines: predicted"
    return curves.picture(title, "iterations", "seconds of ten", drawn, from_zero=False)
