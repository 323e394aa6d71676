"""CURVE keys, addresses and authentication: who may connect to the hub, and from where.

A folder of keys has hub.key and worker.key, which are secret and readable by their owner only, and
hub.pub and worker.pub. The hub needs hub.key and the .pub of every worker's key; a worker needs
hub.pub and worker.key. Each file is one line: a key in Z85, 40 characters.

Not `zmq.auth`: its certificates are written with the umask's mode, and its authenticator neither
works without an event loop nor reports the address of a client that it refuses.
"""

import os
import re
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

import zmq
from zmq.utils import z85

from paceline.core.errors import InvalidInput
from paceline.links.files.reading import read_file

_SECRET_MODE, _PUBLIC_MODE, _FOLDER_MODE = 0o600, 0o644, 0o700
_MOST_NBYTES = 64  # of a file
_Z85 = re.compile(rb"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")

# A host in brackets may be an IPv6 address, which has colons of its own.
_ADDRESS = re.compile(r"tcp://(?:\[([\w.:%-]+)\]|([\w.%-]+)):(\d{1,5})", re.ASCII)
_MAX_PORT = 65535

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"  # where libzmq looks for an authenticator
_ZAP_VERSION = b"1.0"
_ZAP_NUM_FRAMES = 7  # version, request, domain, address, routing id, mechanism, key
_KEY_NBYTES = 32  # of a key that is not encoded


@dataclass(frozen=True)
class HubKeys:
    """The hub's secret key, and the public keys of the workers that may join, in Z85."""

    secret: bytes = field(repr=False)
    workers: frozenset[bytes]


@dataclass(frozen=True)
class WorkerKeys:
    """A worker's pair of keys, and the hub's public key, in Z85."""

    secret: bytes = field(repr=False)
    public: bytes
    hub: bytes


def generate_keys(folder: Path) -> tuple[Path, ...]:
    """Write new keys for a hub and its workers, and return the files.

    Raises InvalidInput if one of them exists, or the folder cannot be written to.
    """
    _check_curve()
    written = []
    try:
        folder.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
        # Look at all four before writing the first, so that a refusal leaves no half of a pair.
        for name in ("hub.key", "hub.pub", "worker.key", "worker.pub"):
            if (folder / name).exists():
                raise InvalidInput(
                    "keys", f"{folder / name} is there already", hint="choose another folder"
                )
        for name in ("hub", "worker"):
            public, secret = zmq.curve_keypair()
            written.append(_write(folder / f"{name}.key", secret, _SECRET_MODE))
            written.append(_write(folder / f"{name}.pub", public, _PUBLIC_MODE))
    except OSError as error:
        raise InvalidInput(str(folder), f"keys cannot be written: {error.strerror}") from error
    return tuple(written)


def load_hub_keys(folder: Path) -> HubKeys:
    """Read the hub's keys; the owner of every .pub but the hub's own may join.

    Raises InvalidInput if a file is missing or holds no key, or others can read the secret one.
    """
    _check_curve()
    secret = _read(folder / "hub.key", is_secret=True)
    files = [path for path in sorted(folder.glob("*.pub")) if path.stem != "hub"]
    if not files:
        raise InvalidInput("keys", f"{folder} has no worker.pub: no worker could join")
    return HubKeys(secret, frozenset(_read(path) for path in files))


def load_worker_keys(folder: Path) -> WorkerKeys:
    """Read a worker's keys. Raises InvalidInput as `load_hub_keys` does."""
    _check_curve()
    secret = _read(folder / "worker.key", is_secret=True)
    return WorkerKeys(secret, zmq.curve_public(secret), _read(folder / "hub.pub"))


def _write(path: Path, key: bytes, mode: int) -> Path:
    # The mode is set on creation, so that a secret key is never readable by others, and O_EXCL
    # neither overwrites a key nor follows a link.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, mode)  # the umask may have taken bits of a public key's mode
        file.write(key + b"\n")
    return path


def _read(path: Path, *, is_secret: bool = False) -> bytes:
    try:
        key = read_file(path, _MOST_NBYTES).strip()
    except InvalidInput as error:
        hint = "`paceline keys` writes one"
        raise InvalidInput(str(path), error.problem, hint=hint) from None
    if not _Z85.fullmatch(key):
        raise InvalidInput(str(path), "is no key, which is one line of 40 characters in Z85")
    mode = stat.S_IMODE(path.stat().st_mode)
    if is_secret and mode & 0o077:
        raise InvalidInput(
            str(path),
            f"can be read or written by others (mode {mode:04o})",
            hint=f"`chmod 600 {path}`",
        )
    return key


def _check_curve() -> None:
    if not zmq.has("curve"):
        raise InvalidInput(
            "keys", "this pyzmq was built without CURVE", hint="install the one from PyPI"
        )


def bind_address(text: str, *, has_keys: bool) -> str:
    """Return the address that a hub binds.

    Raises InvalidInput if it is a name or means every interface, or can be reached from other
    machines and the hub has no keys.
    """
    host, _ = _host_and_port(text)
    if host == "localhost":
        return text.replace(host, "127.0.0.1")
    try:
        ip = ip_address(host)
    except ValueError as error:
        raise InvalidInput(
            "listen", f"{host!r} is no address of an interface, such as 10.0.0.1"
        ) from error
    if ip.is_unspecified:
        raise InvalidInput(
            "listen", f"{host} is every interface", hint="name the one that workers reach"
        )
    _check_plain(text, host, has_keys, "listen")
    return text


def connect_address(text: str, *, has_keys: bool) -> str:
    """Return the address of the hub that a worker connects to.

    Raises InvalidInput if it has no port, or is on another machine and the worker has no keys.
    """
    host, port = _host_and_port(text)
    if not port:
        raise InvalidInput("connect", f"{text!r} has port 0", hint="name the hub's port")
    _check_plain(text, host, has_keys, "connect")
    return text


def _host_and_port(text: str) -> tuple[str, int]:
    """Return host and port of tcp://HOST:PORT; InvalidInput for a text of another form."""
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match[3]) > _MAX_PORT:
        raise InvalidInput("address", f"{text!r} is not of the form tcp://10.0.0.1:5555")
    return match[1] or match[2], int(match[3])


def _check_plain(text: str, host: str, has_keys: bool, option: str) -> None:
    is_loopback = host == "localhost"
    with suppress(ValueError):
        is_loopback = is_loopback or ip_address(host).is_loopback
    if not has_keys and not is_loopback:
        raise InvalidInput(
            option,
            f"{text} can be reached from other machines and needs keys",
            hint=("write them with `paceline keys FOLDER` and give the folder with --keys"),
        )


class Authenticator:
    """The hub's end of ZeroMQ's authentication protocol (ZAP, RFC 27).

    libzmq asks it for every connection of its context, before it reads anything of it. `report` is
    called with a sentence about each client that is refused.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        allowed: frozenset[bytes],
        report: Callable[[str], None],
    ) -> None:
        self._allowed, self._report = allowed, report
        self.socket = context.socket(zmq.REP)
        self.socket.set(zmq.LINGER, 0)
        self.socket.bind(_ZAP_ENDPOINT)

    def answer(self) -> None:
        """Answer one question of libzmq, if there is one."""
        try:
            frames = self.socket.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return
        status = (b"400", b"this key is not known")
        if len(frames) != _ZAP_NUM_FRAMES or frames[0] != _ZAP_VERSION:
            self._report(f"refused a connection with {len(frames) - 6} credentials in place of 1")
        else:
            address, mechanism, key = frames[3], frames[5], frames[6]
            is_key = mechanism == b"CURVE" and len(key) == _KEY_NBYTES
            if is_key and z85.encode(key) in self._allowed:
                status = (b"200", b"OK")
            else:
                sender = address.decode(errors="replace")
                self._report(f"refused a client with an unknown key from {sender}")
        request = frames[1] if len(frames) > 1 else b""
        self.socket.send_multipart((_ZAP_VERSION, request, *status, b"", b""))
