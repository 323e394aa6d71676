"""CURVE keys: who may talk to the hub, and how workers know that it is the hub.

A folder of keys has hub.key and worker.key, which are secret and readable by their owner only, and
hub.pub and worker.pub. The hub needs hub.key and the .pub of every worker's key; a worker needs
hub.pub and worker.key. Each file is one line: a key in Z85, 40 characters.
"""

import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from paceline.core.errors import InvalidInput

_HUB, _WORKER = "hub", "worker"
_PRIVATE = 0o600
_Z85 = re.compile(rb"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


@dataclass(frozen=True)
class HubKeys:
    """The hub's secret key, and the public keys of those who may join. All are Z85."""

    secret: bytes = field(repr=False)
    workers: frozenset[bytes]


@dataclass(frozen=True)
class ClientKeys:
    """A worker's pair of keys, and the hub's public key. All are Z85."""

    secret: bytes = field(repr=False)
    public: bytes
    hub: bytes


def generate(folder: Path) -> tuple[Path, ...]:
    """Write new keys for a hub and its workers; return the files. None is overwritten.

    InvalidInput if one is there, or the folder cannot be written to.
    """
    _check_curve()
    written = []
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in (_HUB, _WORKER):
            for taken in (folder / f"{name}.key", folder / f"{name}.pub"):
                if taken.exists():
                    raise InvalidInput(f"{taken} is there already; choose another folder")
        for name in (_HUB, _WORKER):
            public, secret = zmq.curve_keypair()
            written.append(_write(folder / f"{name}.key", secret, _PRIVATE))
            written.append(_write(folder / f"{name}.pub", public, 0o644))
    except OSError as error:
        raise InvalidInput(f"{folder}: keys cannot be written: {error.strerror}") from error
    return tuple(written)


def load_hub(folder: Path) -> HubKeys:
    """Return the hub's keys; every .pub of the folder but the hub's own may join.

    InvalidInput if a file is missing, or no key, or others may read the secret one.
    """
    _check_curve()
    secret = _read_secret(folder / f"{_HUB}.key")
    files = [path for path in sorted(folder.glob("*.pub")) if path.stem != _HUB]
    if not files:
        raise InvalidInput(f"{folder} has no {_WORKER}.pub: no worker could join")
    return HubKeys(secret, frozenset(_read(path) for path in files))


def load_client(folder: Path) -> ClientKeys:
    """Return a worker's keys. InvalidInput as in `load_hub`."""
    _check_curve()
    secret = _read_secret(folder / f"{_WORKER}.key")
    return ClientKeys(secret, zmq.curve_public(secret), _read(folder / f"{_HUB}.pub"))


def _write(path: Path, key: bytes, mode: int) -> Path:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, mode)  # whatever the umask says
        file.write(key + b"\n")
    return path


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            key = file.read(64).strip()
    except OSError as error:
        raise InvalidInput(
            f"{path}: {error.strerror}; `paceline hub --generate-keys` writes one"
        ) from error
    if not _Z85.fullmatch(key):
        raise InvalidInput(f"{path} is no key, which is one line of 40 characters in Z85")
    return key


def _read_secret(path: Path) -> bytes:
    key = _read(path)
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise InvalidInput(
            f"{path} can be read or written by others (mode {mode:04o}); `chmod 600 {path}`"
        )
    return key


def _check_curve() -> None:
    if not zmq.has("curve"):
        raise InvalidInput("this pyzmq was built without CURVE; install the one from PyPI")
