"""The tutorial, carried out as a reader would: installed from a wheel, outside the repository."""

import re
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import packages
from processes import Started

pytestmark = pytest.mark.slow

TUTORIAL = (packages.ROOT / "docs" / "tutorial.md").read_text()


class Asked(NamedTuple):
    """A command of the tutorial: in which terminal, and whether it is interrupted."""

    terminal: str
    command: str
    interrupted: bool


def files() -> dict[str, str]:
    """The programs that the reader saves, by the name in their first line."""
    blocks = re.findall(r"```python\n# (\S+\.py)\n(.*?)```", TUTORIAL, re.S)
    return dict(blocks)


def consoles() -> Iterator[list[Asked]]:
    """The commands of each block of a terminal; those of two terminals run at the same time."""
    for block in re.findall(r"```console\n(.*?)```", TUTORIAL, re.S):
        lines = block.splitlines()
        yield [
            Asked(match[1], match[2], "^C" in lines[number + 1 : number + 2])
            for number, line in enumerate(lines)
            if (match := re.fullmatch(r"([ab]?)\$ (.*)", line))
        ]


def filled_in(command: str, programs: Path, folder: Path) -> list[str]:
    """The command with its program's path and the names of files for its patterns."""
    program, *rest = shlex.split(command)
    python = str(programs / "python")
    known = {
        "paceline": [str(programs / "paceline")],
        "torchrun": [python, "-m", "torch.distributed.run"],  # not among those of the wheel
    }
    return [*known[program], *(_filled_in(one, folder) for one in rest)]


def _filled_in(argument: str, folder: Path) -> str:
    if "*" not in argument:
        return argument
    (named,) = folder.glob(argument)
    return str(named.relative_to(folder))


@pytest.fixture(scope="module")
def programs(tmp_path_factory) -> Path:
    """The programs of an environment in which the wheel is installed, built from the sdist."""
    folder = tmp_path_factory.mktemp("installed")
    wheel = packages.wheel_of(packages.unpacked_sdist(folder), folder)
    return packages.environment_of(wheel, folder / "environment")


@pytest.mark.parametrize("block", list(consoles()), ids=lambda block: block[0].command[:40])
def test_every_command_has_a_known_form(block):
    """A command that the parser overlooked would never be run."""
    assert {asked.terminal for asked in block} in ({""}, {"a", "b"})


def carried_out(asked: Asked, running: Started) -> None:
    """Wait for a command of the tutorial, which may be interrupted after its first epoch."""
    if asked.interrupted:
        assert any("epoch 1/" in line for line in running.process.stderr)
        running.process.send_signal(signal.SIGINT)
    finished = running.finish()
    wanted = 130 if asked.interrupted else 0
    assert finished.code == wanted, f"{asked.command}\n{finished.out}\n{finished.err}"
    if asked.command.startswith("paceline plan") and "sweep" not in asked.command:
        assert "2 workers are worth using" in finished.out  # as the page says


def test_the_tutorial_from_beginning_to_end(programs, tmp_path):
    for name, text in files().items():
        (tmp_path / name).write_text(text)
    assert [path.name for path in tmp_path.iterdir()] == ["letters.py"]
    num_commands = 0
    for block in consoles():
        begun = [
            (asked, Started(filled_in(asked.command, programs, tmp_path), tmp_path, afresh=True))
            for asked in block
        ]
        try:
            for asked, running in begun:
                carried_out(asked, running)
                num_commands += 1
        finally:
            for _, running in begun:
                running.kill()
    assert num_commands == len(re.findall(r"^[ab]?\$ ", TUTORIAL, re.M)) == 8
    for folder in ("runs", "first", "stopped"):
        (run,) = (tmp_path / folder).iterdir()
        for name in ("report.html", "result.json", "model.safetensors"):
            assert (run / name).stat().st_size > 0
