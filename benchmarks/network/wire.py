"""The wire between the two hosts: its rate and its latency, as tc makes them."""

INTERFACE = "wire"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
# What a host may send at once after a pause. The longer this is, the more a short message gets for
# nothing; the shorter, the more often the timer must be on time.
_BURST_S = 250e-6
# At most this much of TCP goes to the queue at once. What does not fit into a burst is taken frame
# by frame, with a timer for each: at 1 Gbit/s that alone keeps a core busy.
_SEGMENT_BYTES = 16_384
_FRAME_BYTES = 1514  # of Ethernet: 1500 and the header
_LEAST_BURST_BYTES = 4096  # more than two frames, as a frame must fit into it
_QUEUE_FRAMES = 1000  # as Linux queues at a network card
_FRAMES_UNDER_WAY = 100_000  # more than any rate and latency that make sense here


def bits_per_s(rate: str) -> float:
    """Return a rate like "100mbit" in bits/s."""
    return float(rate[:-4]) * _BITS[rate[-4:]]


def segment_bytes(rate: str | None) -> int:
    """Return how much TCP may hand to the queue at once; 64 KB, Linux' own, if nobody shapes it."""
    return 65_536 if rate is None else _SEGMENT_BYTES


def queueing(rate: str | None, latency: str | None) -> list[list[str]]:
    """Return the arguments of tc that give what a host sends this rate and latency.

    A frame first waits for the latency, then for its turn at the rate.
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
