"""Build the wheel from the source distribution, install it, and run the tutorial with it.

The wheel is built once, for any processor.
"""

import re
import shlex
import signal
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path
from typing import NamedTuple
from zipfile import ZipFile

import pytest

from paceline.strategies import EXCHANGES
from processes import Started

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DEADLINE_S = 900.0  # for a hanging command; a compiler on a busy machine takes minutes
SDIST = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
CIBUILDWHEEL = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]
TESTED = [ROOT / one for one in CIBUILDWHEEL["test-command"].split() if one.endswith(".py")]
ON_THIS_PROCESSOR = "test_instruction_sets_are_those_that_the_kernel_lists"
PORTABLE = "--config-settings=cmake.define.PACELINE_PORTABLE=ON"


def run(*command: object, cwd: Path, code: int = 0) -> str:
    """Run a command until it ends, check its exit code, and return its output."""
    found = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert found.returncode == code, found.stdout
    return found.stdout


@pytest.fixture(scope="module")
def portable(tmp_path_factory) -> Path:
    """Build the wheel offline, without vector instruction sets."""
    folder = tmp_path_factory.mktemp("portable")
    run(sys.executable, "-c", SDIST, folder, cwd=ROOT)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    source = folder / archive.name.removesuffix(".tar.gz")
    pip = (sys.executable, "-m", "pip", "wheel", "--no-index", "--no-deps", "--no-build-isolation")
    run(*pip, PORTABLE, "--wheel-dir", folder, source, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def programs(portable: Path, tmp_path_factory) -> Path:
    """Install the wheel in a new environment; return the environment's bin folder.

    The environment uses the dependencies of this Python, because torch alone takes gigabytes.
    """
    folder = tmp_path_factory.mktemp("installed")
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    target = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder)
    (Path(target.strip()) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = (python, "-m", "pip", "install", "--no-index", "--no-deps", "--ignore-installed")
    run(*pip, portable, cwd=folder)
    return folder / "bin"


def test_the_wheel_has_metadata_and_no_sources(portable: Path) -> None:
    with ZipFile(portable) as wheel:
        names = wheel.namelist()
        (described,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        about = Parser().parsestr(wheel.read(described).decode())
    assert "Operating System :: POSIX :: Linux" in about.get_all("Classifier", [])
    left_out = ("tests/", ".cpp", ".hpp", "simulated")
    assert not [name for name in names if any(part in name for part in left_out)]


def test_the_plain_kernels_give_the_same_values(programs: Path, tmp_path: Path) -> None:
    python = programs / "python"
    asked = "import paceline, paceline.native as n; print(paceline.__file__, n.instruction_sets())"
    where, instruction_sets = run(python, "-c", asked, cwd=tmp_path).split()
    assert where.startswith(str(programs.parent))
    assert instruction_sets == "['portable']"
    command = (python, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    done = run(*command, "-k", f"not {ON_THIS_PROCESSOR}", *TESTED, cwd=tmp_path)
    assert " passed" in done


def test_other_systems_than_linux_are_refused_at_build_and_import(tmp_path: Path) -> None:
    asked = ("cmake", "-S", ROOT, "-B", tmp_path, "-DCMAKE_SYSTEM_NAME=Darwin")
    assert "Darwin" in run(*asked, cwd=tmp_path, code=1)
    program = "import sys; sys.platform = 'win32'; import paceline"
    done = run(sys.executable, "-c", program, cwd=tmp_path, code=1)
    assert done.splitlines()[-1].startswith("ImportError: ")


# The tutorial

TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text()


class Asked(NamedTuple):
    """A command of the tutorial, its terminal, and whether the reader interrupts it."""

    terminal: str
    command: str
    interrupted: bool


def consoles() -> Iterator[list[Asked]]:
    """Yield the commands of each console block; two terminals, a and b, run at the same time."""
    for block in re.findall(r"```console\n(.*?)```", TUTORIAL, re.S):
        lines = block.splitlines()
        yield [
            Asked(match[1], match[2], "^C" in lines[number + 1 : number + 2])
            for number, line in enumerate(lines)
            if (match := re.fullmatch(r"([ab]?)\$ (.*)", line))
        ]


def filled_in(command: str, programs: Path, folder: Path) -> list[str]:
    """Split a command, resolve its program, and expand its file patterns."""
    program, *rest = shlex.split(command)
    known = {
        "paceline": [str(programs / "paceline")],
        # The wheel does not install torchrun.
        "torchrun": [str(programs / "python"), "-m", "torch.distributed.run"],
    }
    words = list(known[program])
    for one in rest:
        found = list(folder.glob(one)) if "*" in one else []
        words.append(str(found[0].relative_to(folder)) if found else one)
    return words


def carry_out(asked: Asked, running: Started) -> None:
    """Wait for a command of the tutorial; interrupt it after an epoch if the reader does."""
    if asked.interrupted:
        assert any("epoch 1/" in line for line in running.process.stderr)
        running.process.send_signal(signal.SIGINT)
    finished = running.finish()
    wanted = 130 if asked.interrupted else 0
    assert finished.code == wanted, f"{asked.command}\n{finished.out}\n{finished.err}"


def test_the_tutorial_from_beginning_to_end(programs: Path, tmp_path: Path) -> None:
    files = dict(re.findall(r"```python\n# (\S+\.py)\n(.*?)```", TUTORIAL, re.S))
    assert list(files) == ["letters.py"]
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    num_commands = 0
    for block in consoles():
        assert {asked.terminal for asked in block} in ({""}, {"a", "b"})
        begun = [
            (asked, Started(filled_in(asked.command, programs, tmp_path), tmp_path, afresh=True))
            for asked in block
        ]
        try:
            for asked, running in begun:
                carry_out(asked, running)
                num_commands += 1
        finally:
            for _, running in begun:
                running.kill()
    assert num_commands == len(re.findall(r"^[ab]?\$ ", TUTORIAL, re.M)) == 8
    for folder in ("runs", "first", "stopped"):
        (found,) = (tmp_path / folder).iterdir()
        for name in ("report.html", "result.json", "model.safetensors"):
            assert (found / name).stat().st_size > 0


def test_the_loop_of_the_readme_runs_and_prints_the_chosen_exchange(start, tmp_path) -> None:
    readme = (ROOT / "README.md").read_text()
    ((name, program),) = re.findall(r"```python\n# (\S+\.py)\n(.*?)```", readme, re.S)
    (tmp_path / name).write_text(program)
    (asked,) = re.findall(r"Run `torchrun (.+?)`", readme)
    arguments = shlex.split(asked)
    assert arguments[-1] == name
    # --standalone uses a free port; other tests may use torchrun's default port.
    command = ("-m", "torch.distributed.run", "--standalone", *arguments)
    done = start(*command).finish()
    assert done.code == 0, done.err
    # Both ranks print to one pipe, so their lines may be interleaved.
    chosen = re.findall(rf"({'|'.join(EXCHANGES)}): ", done.out)
    assert len(chosen) == int(arguments[arguments.index("--nproc-per-node") + 1])
    assert len(set(chosen)) == 1
