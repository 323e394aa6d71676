"""Synthetic sets that resemble covtype, w8a, delicious and real-sim where no file is at hand.

The labels of a sample are drawn with the probabilities of a random network, the teacher, which
sees the inputs and nothing else: who knows it is right as often as can be, and not always.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch

from paceline.core.errors import InvalidInput
from paceline.data.dataset import Dataset, TensorSamples, require_memory
from paceline.data.lookalike_inputs import (
    Inputs,
    Random,
    Values,
    covtype_inputs,
    document_inputs,
    keyword_inputs,
    offset_for,
    sigmoid,
)
from paceline.data.published import PUBLISHED, check_shape

_SUFFIX = "-like"
_OPTION = re.compile("samples=([1-9][0-9]{0,8})")
_TEST_SHARE = 5  # one in five, as where a file is split
_PILOT_VALUES = 2**25  # of the samples by which a teacher is scaled, and of their scores
_MOST_PILOTS = 2**14
_CHUNK_VALUES = 2**23  # of samples drawn at a time
_LARGEST_CHUNK = 2**12
_LEAST_SPREAD = 0.05  # below it, a feature's scale would be that of a few samples
_TASK, _TRAIN, _TEST = range(3)  # streams of random numbers


@dataclass(frozen=True)
class _Recipe:
    """How a set is made: inputs, and a teacher of a linear and a curved part.

    `curved` is the curved part's share of the variance of the scores, `sharpness` multiplies them
    before they become probabilities, and `num_labels` is how many labels a sample has on average
    (of two classes: how often it is of the second).
    """

    inputs: Callable[[Random], Inputs]
    num_labels: float
    curved: float
    sharpness: float
    num_units: int = 24


_RECIPES = {
    "covtype": _Recipe(covtype_inputs, 0.4876, 0.75, 11.0),
    "w8a": _Recipe(partial(keyword_inputs, num_features=300, num_present=11.65), 0.0297, 0.05, 9.0),
    "delicious": _Recipe(
        partial(keyword_inputs, num_features=500, num_present=18.17), 19.03, 0.1, 2.0, 8
    ),
    "real-sim": _Recipe(
        partial(document_inputs, num_words=20_958, num_drawn=56.0), 0.3075, 0.0, 24.0
    ),
}
NAMES = tuple(f"{name}{_SUFFIX}" for name in _RECIPES)


@dataclass(frozen=True)
class Task:
    """Draws inputs (n, num_features), and knows the probability of each of their labels.

    `probabilities` returns (n, num_labels), or (n, 1) for the second one of two classes.
    """

    draw: Callable[[Random, int], Values]
    probabilities: Callable[[Values], Values]


def load_lookalike(
    name: str, options: str, sample_shape: tuple[int, ...] | None, seed: int
) -> Dataset:
    """Return one of `NAMES`; the task is always the same, and the seed draws the samples.

    As many as the original has, of which one fifth is for testing; with `samples=N`, N for training
    and a quarter as many (rounded up) for testing. Of samples with another N, the first are the
    same.
    """
    original = name.removesuffix(_SUFFIX)
    known = PUBLISHED[original]
    check_shape(name, known, sample_shape)
    num_test = known.num_samples // _TEST_SHARE
    num_train = known.num_samples - num_test
    if options:
        option = _OPTION.fullmatch(options)
        if not option:
            raise InvalidInput(f"cannot read {options!r} in '{name}:{options}': write samples=5000")
        num_train, num_test = int(option[1]), -(-int(option[1]) // 4)
    shape = (known.num_features,)
    require_memory(num_train + num_test, shape, name)
    train = _samples(original, seed, _TRAIN, num_train)
    test = _samples(original, seed, _TEST, num_test)
    return Dataset(name, train, test, known.num_classes, shape)


@cache
def task(name: str) -> Task:
    """Return the task of the set that looks like `name`."""
    recipe, known = _RECIPES[name], PUBLISHED[name]
    random = _random(0, _TASK, list(_RECIPES).index(name))
    draw, axis = recipe.inputs(random)
    num_outputs = known.num_classes if known.labels is None else 1
    widest = max(known.num_features, 8 * num_outputs)
    pilot = draw(random, min(_MOST_PILOTS, _PILOT_VALUES // widest))
    scores = _teacher(recipe, pilot, axis, num_outputs, random)
    # Labels are as unequally frequent as words; two classes differ by the offset alone.
    frequency = -np.log(np.arange(num_outputs) + 1.0).astype(np.float32)
    raw = scores(pilot) + frequency
    offset = frequency + offset_for(raw, recipe.num_labels)
    return Task(draw, lambda inputs: sigmoid(scores(inputs) + offset))


def _teacher(
    recipe: _Recipe, pilot: Values, axis: Values | None, num_outputs: int, random: Random
) -> Callable[[Values], Values]:
    """Return a network from inputs (n, num_features) to scores (n, num_outputs) of one spread."""
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

    spreads = [part.std(axis=0) for part in parts(pilot)]
    factors = [
        recipe.sharpness * np.sqrt(np.float32(share)) / spread
        for share, spread in zip((1 - recipe.curved, recipe.curved), spreads, strict=True)
    ]

    def scores(inputs: Values) -> Values:
        line, curve = parts(inputs)
        centred: Values = line * factors[0] + curve * factors[1]
        return centred

    return scores


def _samples(name: str, seed: int, stream: int, num_samples: int) -> TensorSamples:
    known, made = PUBLISHED[name], task(name)
    inputs = np.empty((num_samples, known.num_features), dtype=np.float32)
    several = known.labels is None
    labels = np.empty((num_samples, known.num_classes if several else 1), dtype=np.bool_)
    size = min(_LARGEST_CHUNK, _CHUNK_VALUES // known.num_features)
    for number, first in enumerate(range(0, num_samples, size)):
        random = _random(seed, stream, number)
        # Whole chunks, whatever is kept of them: so the first samples are always the same.
        values = made.draw(random, size)
        chances = made.probabilities(values)
        drawn = random.random(chances.shape, dtype=np.float32) < chances
        rows = slice(first, first + size)
        inputs[rows], labels[rows] = values[: num_samples - first], drawn[: num_samples - first]
    targets = torch.from_numpy(labels)
    return TensorSamples(torch.from_numpy(inputs), targets if several else targets[:, 0].long())


def _random(seed: int, *key: int) -> Random:
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))
