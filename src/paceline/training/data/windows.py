"""Samples of a long sequence of tokens: windows that stand side by side.

A window is read when a batch asks for it, straight from the sequence, which may be a file that is
mapped into memory. An epoch takes each window once; the order is the sampler's.
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
IGNORED = -100  # a target of no token, as torch.nn.functional.cross_entropy has it
_MASKED_SHARE = 0.15
_KEPT, _RANDOM = 0.1, 0.1  # of the masked places; the others get the mask


@dataclass(frozen=True, eq=False)
class TokenWindows(IndexedSamples):
    """Windows of `length` tokens, each with the tokens that come next.

    `tokens` (N,) are integers from 0 to `vocabulary` - 1; `source` names them in errors. Inputs and
    targets of a sample are int64 (length,). Taking samples raises InvalidInput for a token outside
    of the vocabulary.
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
    """Windows of `length` tokens, some of them hidden: targets are the tokens that were there.

    Of each window the same number of places is masked, 15 % and at least one. Eight in ten of them
    get the token `vocabulary`, the mask; one in ten a random token, and one in ten stays (Devlin et
    al. 2018, section 3.1). Targets are -100 in all other places. `seed` and a sample's index decide
    alone. Shapes and errors are those of `TokenWindows`.
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
        """Return the masked places (M,) of a window, and the tokens (M,) that it gets there."""
        count = max(1, round(_MASKED_SHARE * self.length))
        # Raw bits: numpy promises that these never change, but not so for its distributions.
        bits = np.random.PCG64(np.random.SeedSequence(self.seed, spawn_key=(index,)))
        places = np.argsort(bits.random_raw(self.length), kind="stable")[:count]
        draws = bits.random_raw(count) / 2.0**64
        random = (bits.random_raw(count) % self.vocabulary).astype(np.int64)
        unmasked = np.where(draws < _KEPT, window[places], random)
        return places, np.where(draws < _KEPT + _RANDOM, unmasked, self.vocabulary)


def _gather(
    samples: TokenWindows | MaskedTokens, indices: Sequence[int], width: int
) -> NDArray[np.int64]:
    """Return the windows (len(indices), width) from the places where those of `length` begin."""
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
