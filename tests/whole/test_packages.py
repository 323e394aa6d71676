"""What is published: a wheel from a source distribution alone, installed where nothing else is."""

import sys
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest

import packages
from packages import ROOT, run

pytestmark = pytest.mark.slow

# Tests with values for each instruction set, or for the best that there is.
KERNELS = ("sum", "codec_kernels", "four_bit", "cast_kernels", "hogbatch_dense")
PORTABLE = "--config-settings=cmake.define.PACELINE_PORTABLE=ON"


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """The source distribution, unpacked outside the repository."""
    return packages.unpacked_sdist(tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def portable(source: Path, tmp_path_factory) -> Path:
    """The wheel as a processor without any vector instruction set that is known has it."""
    return packages.wheel_of(source, tmp_path_factory.mktemp("portable"), PORTABLE)


@pytest.fixture(scope="module")
def programs(portable: Path, tmp_path_factory) -> Path:
    return packages.environment_of(portable, tmp_path_factory.mktemp("installed") / "environment")


def test_the_wheel_says_where_it_comes_from_and_where_it_runs(portable: Path) -> None:
    with ZipFile(portable) as wheel:
        names = wheel.namelist()
        (described,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        about = Parser().parsestr(wheel.read(described).decode())
    urls = dict(one.split(", ") for one in about.get_all("Project-URL", []))
    assert set(urls) == {"Repository", "Documentation", "Changelog", "Issues"}
    classifiers = about.get_all("Classifier", [])
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in range(11, 15)} <= set(
        classifiers
    )
    assert "Operating System :: POSIX :: Linux" in classifiers
    sources = {name for name in names if name.endswith((".cpp", ".hpp"))}
    assert sources == {"paceline/devices/simulated_guard.cpp"}  # compiled where it is used
    assert not [name for name in names if "tests/" in name]


def test_machines_and_tables_of_papers_are_found_in_it(programs: Path, tmp_path: Path) -> None:
    paceline = programs / "paceline"
    where = run(
        programs / "python", "-c", "import paceline; print(paceline.__file__)", cwd=tmp_path
    )
    assert where.startswith(str(programs.parent))
    planned = run(paceline, "plan", "lenet5", "--machine", "k40-gigabit", cwd=tmp_path)
    assert "lenet5 predicted on k40-gigabit" in planned
    assert "wheel" in run(paceline, "papers", "wheel", cwd=tmp_path)


@pytest.mark.parametrize("name", KERNELS)
def test_the_plain_kernels_give_the_same_values(name: str, programs: Path, tmp_path: Path) -> None:
    python = programs / "python"
    asked = "from paceline.native import instruction_sets; print(instruction_sets())"
    assert run(python, "-c", asked, cwd=tmp_path) == "[]\n"
    test = ROOT / "tests" / "unit" / f"test_{name}.py"
    done = run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", test, cwd=tmp_path)
    assert " passed" in done


def test_elsewhere_installing_ends_with_one_sentence(tmp_path: Path) -> None:
    asked = ("cmake", "-S", ROOT, "-B", tmp_path, "-DCMAKE_SYSTEM_NAME=Darwin")
    done = " ".join(run(*asked, cwd=tmp_path, code=1).split())  # cmake breaks lines
    assert "Paceline runs on Linux only" in done
    assert "this is Darwin." in done


def test_elsewhere_importing_ends_with_one_sentence(tmp_path: Path) -> None:
    program = "import sys; sys.platform = 'win32'; import paceline"
    done = run(sys.executable, "-c", program, cwd=tmp_path, code=1)
    assert done.splitlines()[-1].startswith("ImportError: Paceline runs on Linux only")


def test_wheels_of_both_processors_are_configured() -> None:
    """Other settings of cibuildwheel are its own concern, and need containers."""
    built = packages.project()["tool"]["cibuildwheel"]
    assert built["archs"] == ["x86_64", "aarch64"]
    command = built["test-command"].split()
    tests = [part for part in command if part.endswith(".py")]
    assert all((ROOT / test).is_file() for test in tests)
    assert {f"tests/unit/test_{name}.py" for name in KERNELS} <= set(tests)
