"""The wire between the two hosts: its addresses, and the arguments of tc for its rate."""

INTERFACE = "wire"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
# After a pause, a host may send this much time's data at once. A longer burst lets short messages
# exceed the rate; a shorter burst needs more frequent timers.
_BURST_S = 250e-6
# Most TCP data that enters the queue at once. The kernel splits data that exceeds a burst into
# frames with a timer each, which keeps a core busy at 1 Gbit/s.
_SEGMENT_BYTES = 16_384
_FRAME_BYTES = 1514  # Ethernet: 1500 bytes and the header
_LEAST_BURST_BYTES = 4096  # more than two frames, because a burst must hold a frame
_QUEUE_FRAMES = 1000  # Linux's default for a network card


def bits_per_s(rate: str) -> float:
    """Convert a rate such as "100mbit" to bits/s."""
    return float(rate[:-4]) * _BITS[rate[-4:]]


def segment_bytes(rate: str | None) -> int:
    """Return the most bytes that TCP may queue at once; without a rate, Linux's 64 KB."""
    return 65_536 if rate is None else _SEGMENT_BYTES


def queueing(rate: str | None) -> list[str]:
    """Return the arguments of tc that limit a host's rate; none for an unlimited wire."""
    if rate is None:
        return []
    burst = max(_LEAST_BURST_BYTES, round(bits_per_s(rate) / 8 * _BURST_S))
    queue = _QUEUE_FRAMES * _FRAME_BYTES
    bucket = ["tbf", "rate", rate, "burst", str(burst), "limit", str(queue)]
    return ["qdisc", "add", "dev", INTERFACE, "root", *bucket]
