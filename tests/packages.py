"""Build what is published, and install it in environments that do not know the repository."""

import subprocess
import sys
import sysconfig
import tarfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DEADLINE_S = 900.0  # for what hangs: a compiler on a busy machine takes minutes
_SDIST = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"


def run(*command: object, cwd: Path, code: int = 0) -> str:
    """Run a command to its end, and return what it has printed."""
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


def project() -> dict[str, Any]:
    """Return pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def unpacked_sdist(folder: Path) -> Path:
    """Build the source distribution, and return the folder that it is unpacked to."""
    run(sys.executable, "-c", _SDIST, folder, cwd=ROOT)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def wheel_of(source: Path, folder: Path, *options: str) -> Path:
    """Build a wheel of an unpacked source distribution, without a network."""
    pip = (sys.executable, "-m", "pip", "wheel", "--no-index", "--no-deps", "--no-build-isolation")
    run(*pip, *options, "--wheel-dir", folder, source, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


def environment_of(wheel: Path, folder: Path) -> Path:
    """Install a wheel in an environment of its own, and return its folder of programs.

    What Paceline depends on is that of this Python: torch alone would be gigabytes.
    """
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    target = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder)
    (Path(target.strip()) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = (python, "-m", "pip", "install", "--no-index", "--no-deps", "--ignore-installed")
    run(*pip, wheel, cwd=folder)
    return folder / "bin"
