"""Payloads as rows of bytes, for messages whose length both ends know beforehand.

Each row is a header of int64, which says how many values were not finite, how many buffers there
are and how long each is; then the buffers, and what is missing to a whole int64.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.codecs.payload import MOST_BUFFERS, Payload
from paceline.core.errors import InvalidInput

_HEADER = 2 + MOST_BUFFERS  # int64
_HEADER_NBYTES = 8 * _HEADER


def row_nbytes(payload_nbytes: int) -> int:
    """Return the bytes of a row with a payload of so many; each row begins on a whole int64."""
    return _HEADER_NBYTES + -(-payload_nbytes // 8) * 8


def pack(payloads: Sequence[Payload], nbytes: int, device: torch.device) -> Tensor:
    """Return the payloads as rows, uint8 [payloads, nbytes], on a device."""
    rows = torch.empty(len(payloads), nbytes, dtype=torch.uint8, device=device)
    headers = torch.zeros(len(payloads), _HEADER, dtype=torch.int64)
    for row, header, payload in zip(rows, headers, payloads, strict=True):
        sizes = [buffer.numel() for buffer in payload.buffers]
        facts = [payload.num_nonfinite, len(sizes), *sizes]
        header[: len(facts)] = torch.tensor(facts)
        parts = row[_HEADER_NBYTES : _HEADER_NBYTES + sum(sizes)].split(sizes)
        for part, buffer in zip(parts, payload.buffers, strict=True):
            part.copy_(buffer)
    rows[:, :_HEADER_NBYTES] = headers.view(torch.uint8).to(device)
    return rows


def unpack(rows: Tensor, codec: str, count: int) -> list[Payload]:
    """Return what rows carry, `count` values each; InvalidInput if it is more than they hold."""
    headers = rows[:, :_HEADER_NBYTES].contiguous().cpu().view(torch.int64).tolist()
    payloads = []
    for row, (num_nonfinite, num_buffers, *all_sizes) in zip(rows, headers, strict=True):
        sizes = all_sizes[: max(0, num_buffers)]
        if min(sizes, default=0) < 0 or _HEADER_NBYTES + sum(sizes) > len(row):
            raise InvalidInput(
                f"a row of {len(row)} bytes speaks of buffers of {sizes} bytes: do all ranks "
                "use the same codec?"
            )
        parts = row[_HEADER_NBYTES : _HEADER_NBYTES + sum(sizes)].split(sizes)
        payloads.append(Payload(codec, count, tuple(parts), num_nonfinite))
    return payloads
