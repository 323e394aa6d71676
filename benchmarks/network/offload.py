"""Turn off segmentation offload on an interface, as `ethtool -K` does.

    nsenter --target PID --net python offload.py INTERFACE

With offload, a veth passes up to 64 KB of TCP as one frame, and counts the headers of one frame.
Without offload, every frame on the wire has its headers, and the counters include them.
"""

import array
import fcntl
import socket
import struct
import sys

_SIOCETHTOOL = 0x8946
_ETHTOOL_STSO = 0x1F
_ETHTOOL_SGSO = 0x24


def switch_off(interface: str) -> None:
    """Turn off an interface's segmentation offloads; raise OSError if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as anywhere:
        for setting in (_ETHTOOL_STSO, _ETHTOOL_SGSO):
            value = array.array("I", [setting, 0])
            request = struct.pack("16sP16x", interface.encode(), value.buffer_info()[0])
            fcntl.ioctl(anywhere, _SIOCETHTOOL, request)


if __name__ == "__main__":
    switch_off(sys.argv[1])
