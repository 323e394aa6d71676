"""Synthetic sets that resemble covtype, w8a, delicious and real-sim where no file is at hand.

    spec = file_of("covtype-like", 20_000)      # libsvm:FILE, for `paceline train --data`

The labels of a sample are drawn with the probabilities of a random network, the teacher, which sees
nothing but the inputs: even a perfect model is wrong as often as the draw is unlikely.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.core.errors import InvalidInput
from paceline.links.files.writing import written_whole
from paceline.training.data.dataset import Dataset, Shape, TensorSamples, require_memory
from paceline.training.data.sampler import TEST_SHARE
from papers.hogbatch_files import PUBLISHED, check_shape

Values = NDArray[np.float32]
Random = np.random.Generator

_NUM_LATENT = 4  # what the values of a sample have in common
_NUM_POSITIONS = 16
_WORDS_SPREAD = 0.6  # of the logarithm of a document's words
_SUFFIX = "-like"
_OPTION = re.compile("samples=([1-9][0-9]{0,8})")
_PILOT_VALUES = 2**25  # of the samples by which a teacher is scaled, and of their scores
_MOST_PILOTS = 2**14
_CHUNK_VALUES = 2**23  # of samples drawn at a time
_LARGEST_CHUNK = 2**12
_LEAST_SPREAD = 0.05  # below it, a feature's scale would be that of a few samples
_TASK, _TRAIN, _TEST = range(3)  # streams of random numbers
_DRAWN = Path(__file__).parents[2] / "build" / "drawn"


Draw = Callable[[Random, int], Values]  # returns that many samples
# How to draw, and a direction along which the samples lie, if there is one.
Inputs = tuple[Draw, Values | None]


def covtype_inputs(random: Random) -> Inputs:
    """Draw 10 quantities from 0 to 1, and bits for one of 4 areas and one of 40 soils."""
    mixing = random.standard_normal((_NUM_LATENT, 10), dtype=np.float32)
    choices = [random.standard_normal((_NUM_LATENT, count), dtype=np.float32) for count in (4, 40)]

    def draw(random: Random, num_samples: int) -> Values:
        latent = random.standard_normal((num_samples, _NUM_LATENT), dtype=np.float32)
        noise = random.standard_normal((num_samples, 10), dtype=np.float32)
        parts = [sigmoid(0.7 * (latent @ mixing) + noise)]
        for loadings in choices:
            # The greatest of such sums is a draw with these log-probabilities.
            chances = latent @ loadings + _log_zipf(loadings.shape[1])
            chances += random.gumbel(size=chances.shape).astype(np.float32)
            parts.append(np.eye(loadings.shape[1], dtype=np.float32)[chances.argmax(axis=1)])
        return np.concatenate(parts, axis=1)

    return draw, None


def keyword_inputs(random: Random, num_features: int, num_present: float) -> Inputs:
    """Return bits for keywords, few frequent and many rare; a sample has `num_present` of them."""
    loadings = 0.5 * random.standard_normal((_NUM_LATENT, num_features), dtype=np.float32)
    frequency = -np.log(random.permutation(num_features) + 10.0).astype(np.float32)
    pilot = random.standard_normal((2000, _NUM_LATENT), dtype=np.float32) @ loadings
    frequency += offset_for(pilot + frequency, num_present)

    def draw(random: Random, num_samples: int) -> Values:
        latent = random.standard_normal((num_samples, _NUM_LATENT), dtype=np.float32)
        present = sigmoid(latent @ loadings + frequency)
        return (random.random(present.shape, dtype=np.float32) < present).astype(np.float32)

    return draw, None


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

    return draw, side.astype(np.float32)[:, None]


def _log_zipf(count: int) -> Values:
    frequencies: Values = -np.log(np.arange(count) + 1.0).astype(np.float32)
    return frequencies


def sigmoid(values: Values) -> Values:
    """Return 1 / (1 + exp(-x)), without overflow."""
    chances: Values = 0.5 + 0.5 * np.tanh(0.5 * values)
    return chances


def offset_for(scores: Values, total: float) -> np.float32:
    """Return an offset for scores (n, m) with which the sigmoids of a row add up to `total`.

    They do on average over the rows; 0 < total < m.
    """
    low, high = -60.0, 60.0
    for _ in range(40):
        middle = (low + high) / 2
        is_low = sigmoid(scores + np.float32(middle)).sum(axis=1).mean() < total
        low, high = (middle, high) if is_low else (low, middle)
    return np.float32((low + high) / 2)


@dataclass(frozen=True)
class _Generation:
    """The parameters of a set: its inputs, and a teacher with a linear and a curved part.

    `curved`: the curved part's share of the variance of the scores. `sharpness` multiplies the
    scores before they become probabilities. `num_labels`: the mean number of labels of a sample;
    of two classes, the share of the second.
    """

    inputs: Callable[[Random], Inputs]
    num_labels: float
    curved: float
    sharpness: float
    num_units: int = 24


_GENERATIONS = {
    "covtype": _Generation(covtype_inputs, 0.4876, 0.75, 11.0),
    "w8a": _Generation(
        partial(keyword_inputs, num_features=300, num_present=11.65), 0.0297, 0.05, 9.0
    ),
    "delicious": _Generation(
        partial(keyword_inputs, num_features=500, num_present=18.17), 19.03, 0.1, 2.0, 8
    ),
    "real-sim": _Generation(
        partial(document_inputs, num_words=20_958, num_drawn=56.0), 0.3075, 0.0, 24.0
    ),
}
NAMES = tuple(f"{name}{_SUFFIX}" for name in _GENERATIONS)


def file_of(name: str, num_samples: int) -> str:
    """Return the spec of a LIBSVM file with samples of one of `NAMES`, drawn if it is not there."""
    from sklearn.datasets import dump_svmlight_file

    path = _DRAWN / f"{name}-{num_samples}.libsvm"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        drawn = load_lookalike(name, f"samples={num_samples}", None, 0).train
        assert isinstance(drawn, TensorSamples)
        with written_whole(path) as whole:
            dump_svmlight_file(
                drawn.inputs.numpy(), drawn.targets.numpy(), str(whole), zero_based=False
            )
    return f"libsvm:{path}"


def load_lookalike(name: str, options: str, sample_shape: Shape | None, seed: int) -> Dataset:
    """Return one of `NAMES`; the task is always the same, and the seed draws the samples.

    As many as the original has, of which one fifth is for testing; with `samples=N`, N for training
    and a quarter as many (rounded up) for testing. Of samples with another N, the first are the
    same.
    """
    original = name.removesuffix(_SUFFIX)
    known = PUBLISHED[original]
    check_shape(name, known, sample_shape)
    num_test = known.num_samples // TEST_SHARE
    num_train = known.num_samples - num_test
    if options:
        option = _OPTION.fullmatch(options)
        if not option:
            raise InvalidInput(
                "data", f"cannot read {options!r} in '{name}:{options}': write samples=5000"
            )
        num_train, num_test = int(option[1]), -(-int(option[1]) // 4)
    shape = (known.num_features,)
    require_memory(num_train + num_test, shape)
    (draw, probabilities), several = task(original), known.labels is None

    def samples(stream: int, num_samples: int) -> TensorSamples:
        inputs = np.empty((num_samples, known.num_features), dtype=np.float32)
        labels = np.empty((num_samples, known.num_classes if several else 1), dtype=np.bool_)
        size = min(_LARGEST_CHUNK, _CHUNK_VALUES // known.num_features)
        for number, first in enumerate(range(0, num_samples, size)):
            random = _random(seed, stream, number)
            # Draw whole chunks, whatever is kept, so that the first samples are always the same.
            values = draw(random, size)
            chances = probabilities(values)
            drawn = random.random(chances.shape, dtype=np.float32) < chances
            rows = slice(first, first + size)
            inputs[rows], labels[rows] = values[: num_samples - first], drawn[: num_samples - first]
        targets = torch.from_numpy(labels)
        return TensorSamples(torch.from_numpy(inputs), targets if several else targets[:, 0].long())

    train, test = samples(_TRAIN, num_train), samples(_TEST, num_test)
    return Dataset(name, train, test, known.num_classes, shape)


@cache
def task(name: str) -> tuple[Draw, Callable[[Values], Values]]:
    """Return how to draw inputs (n, num_features), and the probability of each of their labels.

    The latter are (n, num_labels), or (n, 1) for the second one of two classes. They come from the
    teacher's scores (n, num_outputs), which are of one spread.
    """
    recipe, known = _GENERATIONS[name], PUBLISHED[name]
    random = _random(0, _TASK, list(_GENERATIONS).index(name))
    draw, axis = recipe.inputs(random)
    num_outputs = known.num_classes if known.labels is None else 1
    widest = max(known.num_features, 8 * num_outputs)
    pilot = draw(random, min(_MOST_PILOTS, _PILOT_VALUES // widest))
    if axis is None:
        scale = 1 / np.maximum(pilot.std(axis=0), _LEAST_SPREAD)
        drawn = random.standard_normal((len(scale), recipe.num_units), dtype=np.float32)
        axis = scale[:, None] * drawn / np.sqrt(np.float32(len(scale)))
    size = (axis.shape[1], num_outputs)
    straight, bent = (random.standard_normal(size, dtype=np.float32) for _ in range(2))
    shift = random.standard_normal(axis.shape[1], dtype=np.float32)
    centre = pilot.mean(axis=0) @ axis

    def parts(inputs: Values) -> tuple[Values, Values]:
        units = inputs @ axis - centre
        return units @ straight, np.sin(2 * units + shift) @ bent

    factors = [
        recipe.sharpness * np.sqrt(np.float32(share)) / part.std(axis=0)
        for share, part in zip((1 - recipe.curved, recipe.curved), parts(pilot), strict=True)
    ]

    def scores(inputs: Values) -> Values:
        line, curve = parts(inputs)
        centred: Values = line * factors[0] + curve * factors[1]
        return centred

    # Labels are as unequally frequent as words; two classes differ by the offset alone.
    frequency = _log_zipf(num_outputs)
    offset = frequency + offset_for(scores(pilot) + frequency, recipe.num_labels)
    return draw, lambda inputs: sigmoid(scores(inputs) + offset)


def _random(seed: int, *key: int) -> Random:
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))
