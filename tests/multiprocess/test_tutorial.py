"""The tutorial, carried out as a reader would: its files are written, its commands are run."""

import re
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text()


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


def arguments_of(command: str, folder: Path) -> list[str]:
    """The arguments of Python for a command, with its patterns of names filled in."""
    program, *rest = shlex.split(command)
    modules = {"paceline": "paceline", "torchrun": "torch.distributed.run"}
    return ["-m", modules[program], *(_filled_in(one, folder) for one in rest)]


def _filled_in(argument: str, folder: Path) -> str:
    if "*" not in argument:
        return argument
    (named,) = folder.glob(argument)
    return str(named.relative_to(folder))


@pytest.mark.parametrize("block", list(consoles()), ids=lambda block: block[0].command[:40])
def test_every_command_has_a_known_form(block):
    """A command that the parser overlooked would never be run."""
    assert {asked.terminal for asked in block} in ({""}, {"a", "b"})


def test_the_tutorial_from_beginning_to_end(start, tmp_path):
    for name, text in files().items():
        (tmp_path / name).write_text(text)
    assert [path.name for path in tmp_path.iterdir()] == ["letters.py"]
    done = 0
    for block in consoles():
        begun = [(asked, start(*arguments_of(asked.command, tmp_path))) for asked in block]
        for asked, running in begun:
            if asked.interrupted:
                assert any("epoch 1/" in line for line in running.process.stderr)
                running.process.send_signal(signal.SIGINT)
            finished = running.finish()
            wanted = 130 if asked.interrupted else 0
            assert finished.code == wanted, f"{asked.command}\n{finished.out}\n{finished.err}"
            done += 1
            if asked.command.startswith("paceline plan") and "sweep" not in asked.command:
                # What the page says that the answer is.
                assert "2 workers are worth using" in finished.out
    assert done == len(re.findall(r"^[ab]?\$ ", TUTORIAL, re.M)) == 8
    for folder in ("runs", "first", "stopped"):
        (run,) = (tmp_path / folder).iterdir()
        for name in ("report.html", "result.json", "model.safetensors"):
            assert (run / name).stat().st_size > 0
