"""Join two network namespaces by a wire with a latency, for kernels without netem.

    python delay.py INTERFACE PID PID BITS_PER_S LATENCY_S

Creates an interface in the namespace of each process, and prints "ready". Each packet occupies the
wire for the time of its frames at the rate, and arrives after the latency. TCP hands over segments
of up to 64 KB, because Python forwards too few frames of 1.5 KB in a second. A packet is dropped if
its queue is full.
"""

import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from itertools import cycle
from math import ceil
from threading import Thread

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_TAP = 0x0002 | 0x1000 | 0x4000  # Ethernet frames, without a protocol, with a virtio header
_OFFLOADS = 0x01 | 0x02 | 0x04  # checksums, and segments of TCP in IPv4 and IPv6
_HEADER_BYTES = 10  # virtio's, which is not sent on a wire
_MOST_BYTES = 65_536 + 256
_FRAME_BYTES, _HEADERS_BYTES = 1514, 66  # of Ethernet, IP and TCP
_QUEUE_FRAMES = 1000  # as Linux queues at a network card


def interface_of(pid: int, name: str) -> int:
    """Create an interface in a process's network namespace; return its descriptor."""
    own, libc = os.open("/proc/self/ns/net", os.O_RDONLY), ctypes.CDLL(None, use_errno=True)
    other = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    try:
        if libc.setns(other, 0):
            raise OSError(ctypes.get_errno(), f"cannot enter the network of process {pid}")
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        libc.setns(own, 0)
    finally:
        os.close(own)
        os.close(other)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP))
    fcntl.ioctl(device, _TUNSETOFFLOAD, _OFFLOADS)
    return device


class Direction:
    """Packets on their way in one direction."""

    def __init__(self, source: int, target: int, bits_per_s: float, latency_s: float) -> None:
        self.source, self._target = source, target
        self._byte_s, self._latency_s = 8 / bits_per_s, latency_s
        self._longest_s = _QUEUE_FRAMES * _FRAME_BYTES * self._byte_s
        self._free_s = 0.0  # when the wire has sent all earlier packets
        self._packets = deque[tuple[float, bytes]]()

    @property
    def due_s(self) -> float:
        """When the next packet arrives."""
        return self._packets[0][0] if self._packets else float("inf")

    def receive(self, now_s: float) -> None:
        """Put all packets of the source on the wire."""
        while True:
            try:
                packet = os.read(self.source, _MOST_BYTES)
            except BlockingIOError:
                return
            nbytes = len(packet) - _HEADER_BYTES
            nbytes += (ceil(nbytes / _FRAME_BYTES) - 1) * _HEADERS_BYTES
            begin_s = max(now_s, self._free_s)
            if begin_s - now_s <= self._longest_s:
                self._free_s = begin_s + nbytes * self._byte_s
                self._packets.append((self._free_s + self._latency_s, packet))

    def deliver(self, now_s: float) -> None:
        """Deliver the packets that have arrived."""
        while self._packets and self._packets[0][0] <= now_s:
            packet = self._packets.popleft()[1]
            try:
                os.write(self._target, packet)
            except OSError:
                return  # the other interface is not up yet


def main() -> None:
    """Forward packets until the process is ended."""
    name, *pids = sys.argv[1:4]
    one, other = (interface_of(int(pid), name) for pid in pids)
    wire = float(sys.argv[4]), float(sys.argv[5])
    directions = Direction(one, other, *wire), Direction(other, one, *wire)
    print("ready", flush=True)
    # Each direction has a core of its own: one core for both would slow down one host's ranks only.
    for direction, core in zip(directions, cycle(os.sched_getaffinity(0)), strict=False):
        Thread(target=forward, args=(direction, core)).start()


def forward(direction: Direction, core: int) -> None:
    """Forward the packets of one direction on a core until the process is ended."""
    os.sched_setaffinity(0, {core})  # of this thread
    while True:
        due_s = direction.due_s
        wait_s = None if due_s == float("inf") else max(0.0, due_s - time.monotonic())
        ready = select.select([direction.source], [], [], wait_s)[0]
        now_s = time.monotonic()
        if ready:
            direction.receive(now_s)
        direction.deliver(now_s)


if __name__ == "__main__":
    main()
