"""Inputs with the sizes, the kinds of values and the density of four well-known data sets."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float32]
Random = np.random.Generator

_NUM_LATENT = 4  # what the values of a sample have in common
_NUM_POSITIONS = 16
_WORDS_SPREAD = 0.6  # of the logarithm of a document's words


class Inputs(NamedTuple):
    """`draw(random, n)` returns n samples; `axis` (or None) is a direction along which they lie."""

    draw: Callable[[Random, int], Values]
    axis: Values | None = None


def covtype_inputs(random: Random) -> Inputs:
    """Return 10 quantities from 0 to 1, one of 4 areas and one of 40 soils, the latter as bits."""
    mixing = random.standard_normal((_NUM_LATENT, 10), dtype=np.float32)
    choices = [
        (random.standard_normal((_NUM_LATENT, count), dtype=np.float32), _zipf(count))
        for count in (4, 40)
    ]

    def draw(random: Random, num_samples: int) -> Values:
        latent = random.standard_normal((num_samples, _NUM_LATENT), dtype=np.float32)
        noise = random.standard_normal((num_samples, 10), dtype=np.float32)
        parts = [sigmoid(0.7 * (latent @ mixing) + noise)]
        for loadings, frequency in choices:
            chances = latent @ loadings + frequency
            # The greatest of such sums is a draw with these log-probabilities.
            chances += random.gumbel(size=chances.shape).astype(np.float32)
            parts.append(np.eye(len(frequency), dtype=np.float32)[chances.argmax(axis=1)])
        return np.concatenate(parts, axis=1)

    return Inputs(draw)


def keyword_inputs(random: Random, num_features: int, num_present: float) -> Inputs:
    """Return bits for keywords, few frequent and many rare; a sample has `num_present` of them."""
    loadings = 0.5 * random.standard_normal((_NUM_LATENT, num_features), dtype=np.float32)
    frequency = -np.log(random.permutation(num_features) + 10.0).astype(np.float32)
    pilot = random.standard_normal((2000, _NUM_LATENT), dtype=np.float32) @ loadings
    frequency += offset_for(pilot + frequency, num_present)

    def draw(random: Random, num_samples: int) -> Values:
        latent = random.standard_normal((num_samples, _NUM_LATENT), dtype=np.float32)
        present = sigmoid(latent @ loadings + frequency)
        drawn = random.random(present.shape, dtype=np.float32) < present
        return drawn.astype(np.float32)

    return Inputs(draw)


def document_inputs(random: Random, num_words: int, num_drawn: float) -> Inputs:
    """Return word weights of documents: rows of length 1, the logarithm of counts, rare words more.

    A document lies somewhere between two subjects, and so do words; that is the axis. It has
    `num_drawn` words on average, with repetitions, in frequencies after Zipf.
    """
    frequency = 1 / (random.permutation(num_words) + 20.0)
    side = random.standard_normal(num_words)
    positions = np.linspace(-2, 2, _NUM_POSITIONS)
    shares = frequency * np.exp(0.8 * np.outer(positions, side))
    shares = np.cumsum(shares, axis=1) / shares.sum(axis=1, keepdims=True)
    shares[:, -1] = 1  # whatever rounding has made of it
    rarity = (-np.log(frequency / frequency.sum())).astype(np.float32)
    middle = np.log(num_drawn) - _WORDS_SPREAD**2 / 2

    def draw(random: Random, num_samples: int) -> Values:
        lengths = random.lognormal(middle, _WORDS_SPREAD, num_samples).astype(np.int64) + 1
        position = random.integers(_NUM_POSITIONS, size=num_samples)
        rows = np.repeat(np.arange(num_samples), lengths)
        drawn = random.random(len(rows))
        words = np.empty(len(rows), dtype=np.int64)
        for number in range(_NUM_POSITIONS):
            mine = position[rows] == number
            words[mine] = np.searchsorted(shares[number], drawn[mine])
        cells, counts = np.unique(rows * num_words + words, return_counts=True)
        rows, words = np.divmod(cells, num_words)
        weights = np.log1p(counts).astype(np.float32) * rarity[words]
        lengths_squared = np.bincount(rows, np.square(weights), minlength=num_samples)
        values = np.zeros((num_samples, num_words), dtype=np.float32)
        values[rows, words] = weights / np.sqrt(lengths_squared[rows]).astype(np.float32)
        return values

    return Inputs(draw, side.astype(np.float32)[:, None])


def _zipf(count: int) -> Values:
    """Return the logarithms of frequencies after Zipf."""
    return -np.log(np.arange(1, 1 + count)).astype(np.float32)


def sigmoid(values: Values) -> Values:
    """Return 1 / (1 + exp(-x)), without overflow."""
    chances: Values = 0.5 + 0.5 * np.tanh(0.5 * values)
    return chances


def offset_for(scores: Values, total: float) -> np.float32:
    """Return what to add to the scores (n, m) so that the sigmoids of a row sum up to `total`.

    That is on average over the rows; 0 < total < m.
    """
    low, high = -60.0, 60.0
    for _ in range(40):
        middle = (low + high) / 2
        is_low = sigmoid(scores + np.float32(middle)).sum(axis=1).mean() < total
        low, high = (middle, high) if is_low else (low, middle)
    return np.float32((low + high) / 2)
