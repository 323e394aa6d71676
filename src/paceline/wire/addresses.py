"""Where the hub is: one address, and without keys only on this machine."""

from dataclasses import dataclass
from ipaddress import ip_address

from paceline.core.errors import InvalidInput

_SCHEME = "tcp://"
_MOST_PORT = 65535


@dataclass(frozen=True)
class Address:
    """A host and a TCP port."""

    host: str
    port: int

    @property
    def is_ipv6(self) -> bool:
        """Whether the host is an IPv6 address."""
        return ":" in self.host

    @property
    def is_loopback(self) -> bool:
        """Whether only processes of this machine can talk over it."""
        if self.host == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        host = f"[{self.host}]" if self.is_ipv6 else self.host
        return f"{_SCHEME}{host}:{self.port}"

    @property
    def to_bind(self) -> str:
        """How ZeroMQ is told to bind it; port 0 is any free one."""
        return str(self) if self.port else str(self)[:-1] + "*"


def parse(text: str) -> Address:
    """Return the address of tcp://HOST:PORT; InvalidInput if it is none."""
    host, colon, port = text.removeprefix(_SCHEME).rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if "[" in host else host
    number = int(port) if port.isascii() and port.isdigit() and len(port) <= len("65535") else -1
    is_name = host and all(c.isascii() and (c.isalnum() or c in ".-_:%") for c in host)
    right = text.startswith(_SCHEME) and colon and is_name and 0 <= number <= _MOST_PORT
    if not right or (":" in host and "[" not in text):
        raise InvalidInput(f"address: {text!r} is not of the form tcp://10.0.0.1:5555")
    return Address(host, number)


def to_bind(text: str, *, has_keys: bool) -> Address:
    """Return the address for a hub: that of one interface; InvalidInput for all, or a name."""
    address = parse(text)
    host = "127.0.0.1" if address.host == "localhost" else address.host
    try:
        ip = ip_address(host)
    except ValueError as error:
        raise InvalidInput(
            f"bind: {address.host!r} is no address of an interface, such as 10.0.0.1"
        ) from error
    if ip.is_unspecified:
        raise InvalidInput(f"bind: {host} is every interface; name the one that workers reach")
    _check_plain(address, has_keys, "bind")
    return Address(host, address.port)


def to_connect(text: str, *, has_keys: bool) -> Address:
    """Return the address of a hub, for a worker."""
    address = parse(text)
    if not address.port:
        raise InvalidInput(f"connect: {text!r} has port 0; name the hub's port")
    _check_plain(address, has_keys, "connect")
    return address


def _check_plain(address: Address, has_keys: bool, what: str) -> None:
    if not has_keys and not address.is_loopback:
        raise InvalidInput(
            f"{what}: {address} can be reached from other machines and needs keys; write them with "
            "`paceline hub --generate-keys FOLDER` and give the folder with --keys"
        )
