"""Build the published packages, and install them in environments outside the repository."""

import subprocess
import sys
import sysconfig
import tarfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DEADLINE_S = 900.0  # for a hanging command; a compiler on a busy machine takes minutes
_SDIST = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"


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


def project() -> dict[str, Any]:
    """Return pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def unpacked_sdist(folder: Path) -> Path:
    """Build and unpack the source distribution, and return its folder."""
    run(sys.executable, "-c", _SDIST, folder, cwd=ROOT)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def wheel_of(source: Path, folder: Path, *options: str) -> Path:
    """Build a wheel from an unpacked source distribution, offline."""
    pip = (sys.executable, "-m", "pip", "wheel", "--no-index", "--no-deps", "--no-build-isolation")
    run(*pip, *options, "--wheel-dir", folder, source, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


def environment_of(wheel: Path, folder: Path) -> Path:
    """Install a wheel in a new environment, and return the environment's `bin` folder.

    The environment uses the dependencies of this Python, because torch alone takes gigabytes.
    """
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    target = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder)
    (Path(target.strip()) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = (python, "-m", "pip", "install", "--no-index", "--no-deps", "--ignore-installed")
    run(*pip, wheel, cwd=folder)
    return folder / "bin"
