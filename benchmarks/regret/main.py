"""Compare the step of `auto` with the fastest method, in 48 settings of two workers."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from cell import ALONE, AUTO
from hosts import TwoHosts, on_hosts

from figures import Part, table
from paceline.links.memory import KEEPING_MEMORY
from ranks import on_ranks

_HERE = Path(__file__).parent
_LINKS: dict[str, tuple[str, str | None] | None] = {
    "shared memory": None,
    "1 Gbit/s": ("1gbit", None),
    "100 Mbit/s": ("100mbit", None),
    "1 Gbit/s, 5 ms": ("1gbit", "5ms"),
}
# model, small and large total batch, sample shape
_MODELS = (
    ("mlp", 32, 512, ""),
    ("lenet5", 32, 512, ""),
    ("resnet18", 8, 32, "3x64x64"),
    ("alexnet", 8, 32, ""),
    ("gpt-1m", 4, 16, ""),
    ("lstm:Lstm", 16, 128, "32x64"),
)
_SLOWDOWNS = (1, 2, 4)
_TOO_LONG, _INSTEAD = ("alexnet", "100 Mbit/s"), "gpt-1m"  # an exchange takes 20 s


def cases(link: str) -> Iterator[str]:
    """Yield the twelve settings of a link; the second worker's slowdown alternates."""
    place = list(_LINKS).index(link)
    for number, (model, *sizes, shape) in enumerate(_MODELS):
        for half, size in enumerate(sizes):
            slowdown = _SLOWDOWNS[(number + half + place) % 3]
            if (model, link) == _TOO_LONG:
                yield f"{_INSTEAD},{size},{slowdown},"
            else:
                yield f"{model},{size},{slowdown},{shape}"


def measure(link: str, quick: bool) -> dict[str, Any]:
    """Measure all settings of a link."""
    wire, found = _LINKS[link], {}
    for case in [*cases(link)][: 2 if quick else None]:
        if wire is None:
            found[case] = on_ranks(_HERE, "cell", 2, quick, case=case)
        else:
            with TwoHosts(*wire) as hosts:
                # as `train` does for each rank, for example under torchrun
                kept = {"environment": KEEPING_MEMORY}
                found[case] = on_hosts(hosts, _HERE, "cell", quick, (case,), **kept)
        print(link, case, f"{_regret(found[case]):.3f}", found[case]["choice"], flush=True)
    return found


def _medians(figures: dict[str, Any]) -> dict[str, float]:
    return {name: median(own) for name, own in figures["seconds"].items()}


def _regret(figures: dict[str, Any]) -> float:
    middle = _medians(figures)
    return middle[AUTO] / min(middle.values())


def text(link: str, figures: dict[str, Any]) -> str:
    """Return the table of a link."""
    lines = []
    for case, own in figures.items():
        model, size, slowdown, _ = case.split(",")
        middle = _medians(own)
        best = min((name for name in middle if name != AUTO), key=middle.__getitem__)
        ddp = min(one for name, one in middle.items() if name.startswith("DDP"))
        lines.append(
            (
                f"{model.partition(':')[0]}, {size}, {slowdown}:1",
                f"{1e3 * middle[AUTO]:.4g}",
                own["choice"],
                f"{1e3 * middle[best]:.4g}",
                best,
                f"{middle[AUTO] / min(middle.values()):.3f}",
                f"{middle[AUTO] / middle[ALONE]:.2f}",
                f"{middle[AUTO] / ddp:.2f}",
                f"{100 * _cost(own):.1f} %",
            )
        )
    chosen = ("model, samples, speeds", "auto, ms", "choice", "best, ms", "best way")
    head = (*chosen, "regret", "of alone", "of tuned DDP", "cost of choosing")
    return f"{_summary(figures)}\n\n{table(link, head, lines)}"


def _cost(own: dict[str, Any]) -> float:
    """Return the time lost in trials relative to 2,000 steps; excludes the profile."""
    step_s = _medians(own)[AUTO]
    lost_s = own["trial_s"] + max(0.0, own["choosing_s"] - own["num_steps"] * step_s)
    return lost_s / (2000 * step_s)


def _summary(figures: dict[str, Any]) -> str:
    regrets = sorted(map(_regret, figures.values()))
    high = quantiles(regrets, n=20, method="inclusive")[-1] if len(regrets) > 1 else regrets[0]
    predicted = sum(_was_predicted(own) for own in figures.values())
    return (
        f"{len(regrets)} settings: regret {median(regrets):.3f} in the median, {high:.3f} at the "
        f"95th percentile, {regrets[-1]:.3f} at most; the prediction alone was within 5 % of the "
        f"best exchange in {predicted}"
    )


def _was_predicted(own: dict[str, Any]) -> bool:
    """Whether the exchange predicted to be fastest is within 5 % of the fastest exchange."""
    middle = _medians(own)
    first = min(own["predicted"], key=own["predicted"].__getitem__).replace(" with ", ", ")
    names = [name for name in (first, f"{first}, balanced") if name in middle]
    fastest = min(one for name, one in middle.items() if name not in (AUTO, ALONE))
    return min(middle[name] for name in names) <= 1.05 * fastest


PARTS = {link: Part(partial(measure, link), partial(text, link)) for link in _LINKS}
