"""Generate a synthetic substitute for covtype, a data set of Ma, Rusu et al. 2020.

    spec = covtype_like(20_000)      # libsvm:FILE, for `paceline train --data`

Labels are drawn with the probabilities that a random network, the teacher, computes from inputs.
Even a perfect model makes errors, because the draw can be the less probable class.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.links.files import written_whole

Values = NDArray[np.float32]
Random = np.random.Generator

NUM_FEATURES = 54
_NUM_LATENT = 4  # latent variables that correlate a sample's features
_NUM_PILOTS = 2**14  # samples for scaling the teacher
_CHUNK = 2**12  # samples per draw
_LEAST_SPREAD = 0.05  # minimum deviation, so that no few samples set a feature's scale
# The nonlinear part's share of the scores' variance; the scores' standard deviation; the second
# class's share of samples; the number of the teacher's units.
_CURVED, _SHARPNESS, _SECOND_CLASS, _NUM_UNITS = 0.75, 11.0, 0.4876, 24
_TASK, _TRAIN = range(2)  # streams of random numbers
_DRAWN = Path(__file__).parents[2] / "build" / "drawn"


def covtype_like(num_samples: int) -> str:
    """Return the spec of a LIBSVM file with `num_samples` samples; create a missing file."""
    from sklearn.datasets import dump_svmlight_file

    path = _DRAWN / f"covtype-like-{num_samples}.libsvm"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        inputs, labels = samples(num_samples)
        with written_whole(path) as whole:
            dump_svmlight_file(inputs, labels, str(whole), zero_based=False)
    return f"libsvm:{path}"


def samples(num_samples: int) -> tuple[Values, NDArray[np.int64]]:
    """Return inputs (n, 54) and classes (n); larger sets begin with the same samples."""
    draw, probability = task()
    inputs, labels = [], []
    for number in range(-(-num_samples // _CHUNK)):
        random = _random(0, _TRAIN, number)
        values = draw(random, _CHUNK)  # whole chunks: samples do not depend on `num_samples`
        chances = probability(values)
        inputs.append(values)
        labels.append(random.random(chances.shape, dtype=np.float32) < chances)
    classes = np.concatenate(labels)[:num_samples, 0].astype(np.int64)
    return np.concatenate(inputs)[:num_samples], classes


@cache
def task() -> tuple[Callable[[Random, int], Values], Callable[[Values], Values]]:
    """Return a sampler of inputs (n, 54), and a function for P(second class) (n, 1).

    Inputs are 10 values in (0, 1), one-hot area (4) and one-hot soil (40). The teacher's scores
    have a linear and a nonlinear part.
    """
    random = _random(0, _TASK, 0)
    mixing = _normal(random, _NUM_LATENT, 10)
    choices = [_normal(random, _NUM_LATENT, count) for count in (4, 40)]

    def draw(random: Random, num_samples: int) -> Values:
        latent = _normal(random, num_samples, _NUM_LATENT)
        parts = [_sigmoid(0.7 * (latent @ mixing) + _normal(random, num_samples, 10))]
        for loadings in choices:
            # Gumbel-max draws a class with these log-probabilities, which follow Zipf's law.
            count = loadings.shape[1]
            chances = latent @ loadings - np.log(np.arange(count) + 1.0).astype(np.float32)
            chances += random.gumbel(size=chances.shape).astype(np.float32)
            parts.append(np.eye(count, dtype=np.float32)[chances.argmax(axis=1)])
        return np.concatenate(parts, axis=1)

    pilot = draw(random, _NUM_PILOTS)
    scale = 1 / np.maximum(pilot.std(axis=0), _LEAST_SPREAD)
    units = _normal(random, NUM_FEATURES, _NUM_UNITS)
    axis = scale[:, None] * units / np.sqrt(np.float32(NUM_FEATURES))
    straight, bent = (_normal(random, _NUM_UNITS, 1) for _ in range(2))
    shift = _normal(random, _NUM_UNITS)
    centre = pilot.mean(axis=0) @ axis

    def parts(inputs: Values) -> tuple[Values, Values]:
        units = inputs @ axis - centre
        return units @ straight, np.sin(2 * units + shift) @ bent

    line, curve = (
        _SHARPNESS * np.sqrt(np.float32(share)) / part.std(axis=0)
        for share, part in zip((1 - _CURVED, _CURVED), parts(pilot), strict=True)
    )

    def scores(inputs: Values) -> Values:
        linear, nonlinear = parts(inputs)
        return linear * line + nonlinear * curve

    offset = _offset_for(scores(pilot), _SECOND_CLASS)
    return draw, lambda inputs: _sigmoid(scores(inputs) + offset)


def _normal(random: Random, *shape: int) -> Values:
    return random.standard_normal(shape, dtype=np.float32)


def _sigmoid(values: Values) -> Values:
    return 0.5 + 0.5 * np.tanh(0.5 * values)


def _offset_for(scores: Values, share: float) -> np.float32:
    """Return the offset that makes the mean sigmoid of scores (n, 1) equal to `share`."""
    low, high = -60.0, 60.0
    for _ in range(40):
        middle = (low + high) / 2
        is_low = _sigmoid(scores + np.float32(middle)).mean() < share
        low, high = (middle, high) if is_low else (low, middle)
    return np.float32((low + high) / 2)


def _random(seed: int, *key: int) -> Random:
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))
