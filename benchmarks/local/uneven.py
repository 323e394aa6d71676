"""Two hosts at 1 Gbit/s, one of which is four times slower: strategy local beside the fast one.

    python benchmarks/local/uneven.py [--quick]

It needs root, for two hosts in namespaces of their own, and for a control group in which the second
one has a quarter of its core. `paceline train` of a GPT of a million parameters (sized_gpt.py) on
the fast host alone, and on both with balanced batches, in turn. Seconds to a loss are a run's steps
until a test first reached it, at its median step. With --quick a few steps show that everything
works; the figures mean nothing, and are not written.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
sys.path.append(str(HERE.parent / "network"))
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # GPUs are for benchmarks/gpu
os.environ["OMP_NUM_THREADS"] = "1"

from host import missing  # noqa: E402
from hosts import TwoHosts  # noqa: E402

import parts  # noqa: E402
from ranks import DEADLINE_S  # noqa: E402

_BATCH_SIZE = 32  # windows of 128 tokens
_EVERY, _NUM_ROUNDS, _REPEATS = 20, 6, 3
_GAIN = 1.6  # inner steps that the fast worker takes for one of the run's, at 4:1
_TESTED_EVERY = 2  # rounds
_PERIOD_US, _SLOWER = 8_000, 4
_GROUPS = Path("/sys/fs/cgroup/cpu")  # of version 1; version 2 has them one folder higher


def measure(quick: bool) -> dict[str, Any]:
    """Return speeds and losses of all runs: of the fast host alone, and of both."""
    if problem := missing():
        sys.exit(problem)
    every, rounds = (5, 2) if quick else (_EVERY, _NUM_ROUNDS)
    alone_every = round(_GAIN * every)
    alone = ["--strategy=host", "--workers=1", f"--batch-size={_BATCH_SIZE}"]
    alone += [f"--steps={alone_every * rounds}"]
    alone += [f"--evaluate-every={_TESTED_EVERY * alone_every}"]
    both = ["--strategy=local", "--workers=2", f"--batch-size={2 * _BATCH_SIZE}"]
    both += [f"--set=sync_every={every}", "--balance=auto"]
    both += [f"--steps={every * rounds}", f"--evaluate-every={_TESTED_EVERY * every}"]
    found: dict[str, list[dict[str, Any]]] = {"alone": [], "both": []}
    with _slow_processes() as members, TwoHosts("1gbit") as hosts:
        for _ in range(1 if quick else _REPEATS):
            found["alone"].append(_run(hosts, alone, members, lone=True))
            found["both"].append(_run(hosts, both, members, lone=False))
    return found


@contextmanager
def _slow_processes() -> Iterator[Path]:
    """Make a control group with a quarter of a core; yield the file that takes its processes."""
    is_first = _GROUPS.is_dir()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as after:
        # The hosts mount a /sys of their own, which has no control groups.
        groups = _GROUPS if is_first else _GROUPS.parent
        subprocess.run(["/bin/mount", "--bind", str(groups), folder], check=True)
        after.callback(subprocess.run, ["/bin/umount", folder], check=True)
        group = Path(folder) / f"slow-{os.getpid()}"
        group.mkdir()
        after.callback(group.rmdir)
        quota = _PERIOD_US // _SLOWER
        if is_first:
            (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (group / "cpu.max").write_text(f"{quota} {_PERIOD_US}")
        yield group / "cgroup.procs"


def _run(hosts: TwoHosts, options: Sequence[str], members: Path, *, lone: bool) -> dict[str, Any]:
    """Return the speed, the shares and the tests of a run."""
    train = ["train", "sized_gpt:small", *options, "--optimizer=adamw", "--learning-rate=0.003"]
    command = [sys.executable, "-m", "paceline", *train, "--json"]
    environment = {"PYTHONPATH": str(HERE)}
    with tempfile.TemporaryDirectory() as folder:
        command += ["--checkpoint-every=never", f"--output={folder}", "--profile-s=2"]
        if lone:  # the other host has nothing to do, and the run's one rank nobody to meet
            script = 'test "$RANK" = 0 || exit 0; export WORLD_SIZE=1; exec "$@"'
        else:
            script = f'test "$RANK" = 0 || echo $$ > {members} || exit; exec "$@"'
        command = ["sh", "-c", script, "sh", *command]
        finished = hosts.run(
            command, environment=environment, cores=(0, 1), cwd=HERE, deadline_s=10 * DEADLINE_S
        )
        if any(one.code for one in finished):
            sys.exit("\n".join(one.err for one in finished))
        (path,) = Path(folder).glob("*/result.json")
        result = json.loads(path.read_text())
    samples_per_step = _BATCH_SIZE * (1 if lone else 2)
    step_s = samples_per_step / result["samples_per_s"]
    tests = [[one["num_steps"] * step_s, one["test_loss"]] for one in result["evaluations"]]
    return {
        "tokens_per_s": result["tokens_per_s"],
        "predicted_samples_per_s": result["predicted_samples_per_s"],
        "samples_per_s": result["samples_per_s"],
        "shares": result["shares"],
        "tests": tests,
    }


def text(_: str, figures: dict[str, Any]) -> str:
    """Return the table."""
    alone = figures["alone"]
    target = max(run["tests"][-1][1] for run in alone)
    base = median(run["tokens_per_s"] for run in alone)
    lines = [
        "| gpt-1m, 1 Gbit/s, 4:1 | tokens/s | times alone | shares | predicted "
        f"| s to a loss of {target:.3f} | last loss |",
        "|---" * 7 + "|",
    ]
    for name, runs in (
        ("the fast host alone", alone),
        ("both, local, balanced", figures["both"]),
    ):
        speeds = sorted(run["tokens_per_s"] for run in runs)
        predicted = [run["predicted_samples_per_s"] for run in runs]
        pairs = zip(predicted, runs, strict=True)
        errors = [own / run["samples_per_s"] - 1 for own, run in pairs if own is not None]
        seconds = [_reached_s(run["tests"], target) for run in runs]
        losses = [run["tests"][-1][1] for run in runs]
        shares = " + ".join(map(str, runs[-1]["shares"] or ()))
        cells = [
            name,
            f"{median(speeds):,.0f} [{speeds[0]:,.0f}, {speeds[-1]:,.0f}]",
            f"{median(speeds) / base:.2f}",
            shares,
            f"{median(errors):+.1%}" if errors else "",
            " ".join("never" if one is None else f"{one:.0f}" for one in seconds),
            f"{median(losses):.3f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _reached_s(tests: Sequence[Sequence[float]], target: float) -> float | None:
    """Return the seconds until the first test with at most that loss."""
    return next((seconds for seconds, loss in tests if loss <= target), None)


if __name__ == "__main__":
    parts.run(HERE, {"uneven": measure}, text)
