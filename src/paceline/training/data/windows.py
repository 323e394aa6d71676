"""Samples of a long token sequence: adjacent windows.

A window is read from the sequence, which may be a memory-mapped file, when a batch needs it. An
epoch uses each window once, in the sampler's order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.core.errors import InvalidInput
from paceline.training.data.dataset import Batch, IndexedSamples

Tokens = NDArray[np.integer[Any]]
IGNORED = -100  # ignore_index of torch.nn.functional.cross_entropy
_MASKED_SHARE = 0.15
_KEPT, _RANDOM = 0.1, 0.1  # share of masked positions with a random token, or unchanged


@dataclass(frozen=True, eq=False)
class TokenWindows(IndexedSamples):
    """Windows of `length` tokens, with the next tokens as targets.

    `tokens` (N,): integers from 0 to `vocabulary` - 1; `source` names them in errors. A sample's
    inputs and targets are int64 (length,). Reading a token outside of the vocabulary raises
    InvalidInput.
    """

    tokens: Tokens
    length: int
    vocabulary: int
    source: str

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.length

    def __getitem__(self, index: int) -> Batch:
        inputs, targets = self.__getitems__([index])
        return inputs[0], targets[0]

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        found = _gather(self, indices, self.length + 1)  # (len(indices), length + 1)
        inputs, targets = (np.ascontiguousarray(part) for part in (found[:, :-1], found[:, 1:]))
        return torch.from_numpy(inputs), torch.from_numpy(targets)


@dataclass(frozen=True, eq=False)
class MaskedTokens(IndexedSamples):
    """Windows of `length` tokens, some masked; targets are the original tokens.

    Each window has the same number of masked positions, 15 % and at least one. Eight in ten get the
    token `vocabulary`, the mask; one in ten gets a random token, and one in ten is unchanged
    (Devlin et al. 2018, section 3.1). Other targets are -100. `seed` and the sample's index
    determine the positions. Shapes and errors are those of `TokenWindows`.
    """

    tokens: Tokens
    length: int
    vocabulary: int
    source: str
    seed: int

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def __getitem__(self, index: int) -> Batch:
        inputs, targets = self.__getitems__([index])
        return inputs[0], targets[0]

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        inputs = _gather(self, indices, self.length)  # (len(indices), length)
        targets = np.full_like(inputs, IGNORED)
        for row, index in enumerate(np.asarray(indices, dtype=np.int64) % max(1, len(self))):
            places, replaced = self._masked(int(index), inputs[row])
            targets[row, places] = inputs[row, places]
            inputs[row, places] = replaced
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def _masked(
        self, index: int, window: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the masked positions (M,) of a window, and their new tokens (M,)."""
        count = max(1, round(_MASKED_SHARE * self.length))
        # Raw bits: numpy guarantees that they never change, unlike its distributions.
        bits = np.random.PCG64(np.random.SeedSequence(self.seed, spawn_key=(index,)))
        places = np.argsort(bits.random_raw(self.length), kind="stable")[:count]
        draws = bits.random_raw(count) / 2.0**64
        random = (bits.random_raw(count) % self.vocabulary).astype(np.int64)
        unmasked = np.where(draws < _KEPT, window[places], random)
        return places, np.where(draws < _KEPT + _RANDOM, unmasked, self.vocabulary)


def _gather(
    samples: TokenWindows | MaskedTokens, indices: Sequence[int], width: int
) -> NDArray[np.int64]:
    """Return windows (len(indices), width) that start where the windows of `length` start."""
    rows = np.asarray(indices, dtype=np.int64)
    count = len(samples)
    if rows.size and not (-count <= rows.min() and rows.max() < count):
        raise IndexError(f"{samples.source} has {count} samples: {rows.tolist()}")
    places = (rows % max(1, count))[:, None] * samples.length + np.arange(width)
    found: NDArray[np.int64] = samples.tokens[places].astype(np.int64)
    is_wrong = (found < 0) | (found >= samples.vocabulary)
    if is_wrong.any():
        wrong = found[is_wrong][0]
        raise InvalidInput(
            samples.source,
            f"has the token {wrong}, but its vocabulary are the numbers from 0 to "
            f"{samples.vocabulary - 1}",
        )
    return found
