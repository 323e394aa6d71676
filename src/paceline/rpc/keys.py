"""CURVE keys, addresses and authentication: who may connect to the hub, and from where.

A folder of keys has four files. hub.key and worker.key are secret and readable only by their owner;
hub.pub and worker.pub are public. The hub needs hub.key and the .pub file of every worker. A worker
needs hub.pub and worker.key. Each file is one line: a key of 40 characters in Z85.

`zmq.auth` is not used: its key files get the umask's mode, and its authenticator needs an event
loop and does not report the address of a refused client.
"""

import os
import re
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import TypeAlias

import zmq
from zmq.utils import z85

from paceline.core.errors import InvalidInput
from paceline.links.files import read_file

Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"

_MOST_NBYTES = 64  # largest size of a key file
_Z85 = re.compile(rb"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")

# A host in brackets may be an IPv6 address, which contains colons.
_ADDRESS = re.compile(r"tcp://(?:\[([\w.:%-]+)\]|([\w.%-]+)):(\d{1,5})", re.ASCII)

_LOCALHOST = "127.0.0.1"

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"  # address at which libzmq queries an authenticator
_ZAP_VERSION = b"1.0"
_KEY_NBYTES = 32  # size of a decoded key


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
    """Write new keys for a hub and its workers, and return the files' paths.

    Raises InvalidInput if one of the files exists or cannot be written.
    """
    _check_curve()
    written = []
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Check all files first, so that an error leaves no secret key without its public key.
        for name in ("hub.key", "hub.pub", "worker.key", "worker.pub"):
            if (folder / name).exists():
                raise InvalidInput(str(folder / name), "exists already", hint="use another folder")
        for name in ("hub", "worker"):
            public, secret = zmq.curve_keypair()
            written.append(_write(folder / f"{name}.key", secret, 0o600))
            written.append(_write(folder / f"{name}.pub", public, 0o644))
    except OSError as error:
        raise InvalidInput(str(folder), f"cannot be written: {error.strerror}") from error
    return tuple(written)


def load_hub_keys(folder: Path) -> HubKeys:
    """Read the hub's secret key, and the workers' public keys: all .pub files except hub.pub.

    Raises InvalidInput if a key is missing or invalid, or if other users can read the secret key.
    """
    secret = _read(folder / "hub.key", is_secret=True)
    files = [path for path in sorted(folder.glob("*.pub")) if path.stem != "hub"]
    if not files:
        problem = "must be a folder with the .pub file of at least one worker"
        raise InvalidInput("keys", problem, got=str(folder))
    return HubKeys(secret, frozenset(_read(path) for path in files))


def load_worker_keys(folder: Path) -> WorkerKeys:
    """Read a worker's keys and the hub's public key, with the checks of `load_hub_keys`."""
    secret = _read(folder / "worker.key", is_secret=True)
    return WorkerKeys(secret, zmq.curve_public(secret), _read(folder / "hub.pub"))


def _write(path: Path, key: bytes, mode: int) -> Path:
    # The mode is set on creation, so that other users can never read a secret key. O_EXCL prevents
    # overwriting a key and following a link.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, mode)  # the umask may have removed some permissions of a public key
        file.write(key + b"\n")
    return path


def _read(path: Path, *, is_secret: bool = False) -> bytes:
    _check_curve()
    try:
        key = read_file(path, _MOST_NBYTES).strip()
    except InvalidInput as error:
        hint = "`paceline keys FOLDER` writes keys"
        raise InvalidInput(str(path), error.problem, hint=hint) from None
    if not _Z85.fullmatch(key):
        raise InvalidInput(str(path), "must be a key: one line of 40 characters in Z85")
    mode = stat.S_IMODE(path.stat().st_mode)
    if is_secret and mode & 0o077:
        problem = f"is accessible to other users (mode {mode:04o})"
        raise InvalidInput(str(path), problem, hint=f"run `chmod 600 {path}`")
    return key


def _check_curve() -> None:
    if not zmq.has("curve"):
        raise InvalidInput("keys", "requires a pyzmq with CURVE", hint="install pyzmq from PyPI")


def bind_address(text: str, *, has_keys: bool) -> str:
    """Return the address that a hub binds, with 127.0.0.1 instead of localhost.

    The host must be localhost or the IP address of one interface; without keys, it must be a
    loopback address. Raises InvalidInput for all other hosts.
    """
    address, _ = _host_and_port(text, "listen", has_keys=True)
    if address is None or address.is_unspecified:
        problem = "must be the address of one interface, such as tcp://10.0.0.1:5555"
        raise InvalidInput("listen", problem, got=text)
    _host_and_port(text, "listen", has_keys=has_keys)
    return text.replace("localhost", _LOCALHOST)


def connect_address(text: str, *, has_keys: bool) -> str:
    """Check and return a hub's address.

    Raises InvalidInput if the port is missing. Without keys, only loopback addresses are valid.
    """
    _, port = _host_and_port(text, "connect", has_keys=has_keys)
    if not port:
        raise InvalidInput("connect", "must have the hub's port", got=text)
    return text


def _host_and_port(
    text: str, option: str, *, has_keys: bool
) -> tuple[IPv4Address | IPv6Address | None, int]:
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match[3]) > 65535:
        raise InvalidInput(option, "must be an address such as tcp://10.0.0.1:5555", got=text)
    host = match[1] or match[2]
    address: IPv4Address | IPv6Address | None = None
    with suppress(ValueError):  # raised for a host name other than localhost
        address = ip_address(_LOCALHOST if host == "localhost" else host)
    if not has_keys and not (address and address.is_loopback):
        problem = "requires keys for every address except a loopback address"
        hint = "write keys with `paceline keys FOLDER`, and add --keys FOLDER"
        raise InvalidInput(option, problem, got=text, hint=hint)
    return address, int(match[3])


class Authenticator:
    """The hub's side of ZeroMQ's authentication protocol (ZAP, RFC 27).

    libzmq asks the authenticator about every connection of `context` before reading a message.
    `allowed`: the public keys of clients that may connect. `report`: called with a sentence about
    each refused client.
    """

    def __init__(
        self, context: Context, allowed: frozenset[bytes], report: Callable[[str], None]
    ) -> None:
        self._allowed, self._report = allowed, report
        self.socket = context.socket(zmq.REP)
        self.socket.set(zmq.LINGER, 0)
        self.socket.bind(_ZAP_ENDPOINT)

    def answer(self) -> None:
        """Answer libzmq's question whether a client may connect, if there is a question.

        The frames of the question are the version, the request, the domain, the client's address
        and routing id, the mechanism, and the credentials.
        """
        try:
            frames = self.socket.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return
        _, request, _, address, _, mechanism, *credentials = frames
        is_key = mechanism == b"CURVE" and list(map(len, credentials)) == [_KEY_NBYTES]
        status = (b"200", b"OK")
        if not (is_key and z85.encode(credentials[0]) in self._allowed):
            status = (b"400", b"unknown key")
            sender = address.decode(errors="replace")
            self._report(f"refused a client with an unknown key from {sender}")
        self.socket.send_multipart((_ZAP_VERSION, request, *status, b"", b""))
