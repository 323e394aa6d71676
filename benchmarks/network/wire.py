"""Build the tc arguments for the rate and latency of the wire between two hosts."""

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
_FRAMES_UNDER_WAY = 100_000  # more than any sensible rate and latency need


def bits_per_s(rate: str) -> float:
    """Convert a rate such as "100mbit" to bits/s."""
    return float(rate[:-4]) * _BITS[rate[-4:]]


def segment_bytes(rate: str | None) -> int:
    """Return the most bytes that TCP may queue at once; without a rate, Linux's 64 KB."""
    return 65_536 if rate is None else _SEGMENT_BYTES


def queueing(rate: str | None, latency: str | None) -> list[list[str]]:
    """Return the tc arguments that set the rate and latency of a host's outgoing frames.

    A frame first waits for the latency, then for the rate.
    """
    commands = []
    place = ["root"]
    if latency is not None:
        delay = ["netem", "delay", latency, "limit", str(_FRAMES_UNDER_WAY)]
        commands.append([*place, "handle", "1:", *delay])
        place = ["parent", "1:1"]
    if rate is not None:
        burst = max(_LEAST_BURST_BYTES, round(bits_per_s(rate) / 8 * _BURST_S))
        queue = _QUEUE_FRAMES * _FRAME_BYTES
        bucket = ["tbf", "rate", rate, "burst", str(burst), "limit", str(queue)]
        commands.append([*place, "handle", "2:", *bucket])
    return [["qdisc", "add", "dev", INTERFACE, *command] for command in commands]
