"""Random samples of any shape that can be learned: a pattern for each class, and noise."""

import re
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from paceline.core.errors import InvalidInput
from paceline.data.dataset import Dataset, TensorSamples, require_memory, shape_text

FORM = "synthetic:3x224x224,classes=10,samples=512"
_NUMBER = "[1-9][0-9]{0,8}"
_SHAPE = re.compile(f"{_NUMBER}(x{_NUMBER})*")
_OPTION = re.compile(f"(classes|samples)=({_NUMBER})")
_PATTERN_SIDE = 4  # coarse enough to survive the pooling of a convolutional network


class _Options(NamedTuple):
    shape: tuple[int, ...] | None
    num_classes: int
    num_train: int


def load_synthetic(options: str, sample_shape: tuple[int, ...] | None, seed: int) -> Dataset:
    """Return `samples` samples for training and a quarter as many (rounded up) for testing.

    A sample is the pattern of its class plus Gaussian noise of the same power, scaled to a mean
    square of about 1; the classes are equally frequent. The patterns of CxHxW samples are smooth.
    The shape is that of the options, or `sample_shape`, or 3x224x224.
    """
    shape, num_classes, num_train = _parse(options)
    if shape and sample_shape and shape != sample_shape:
        raise InvalidInput(
            f"the synthetic samples are {shape_text(shape)}, "
            f"but the model takes {shape_text(sample_shape)}: leave the shape out of the spec"
        )
    shape = shape or sample_shape or (3, 224, 224)
    num_samples = num_train + -(-num_train // 4)
    require_memory(num_samples, shape, "synthetic")

    random = np.random.default_rng(seed)
    patterns = _patterns(shape, num_classes, random)
    train = _draw(num_train, patterns, random)
    test = _draw(num_samples - num_train, patterns, random)
    return Dataset("synthetic", train, test, num_classes, shape)


def _draw(
    num_samples: int, patterns: NDArray[np.float32], random: np.random.Generator
) -> TensorSamples:
    targets = random.permutation(np.arange(num_samples) % len(patterns))
    inputs = random.standard_normal((num_samples, *patterns.shape[1:]), dtype=np.float32)
    for sample, target in zip(inputs, targets, strict=True):
        sample += patterns[target]  # row by row: a sum over all would double the memory
    inputs *= np.float32(0.5**0.5)
    return TensorSamples(torch.from_numpy(inputs), torch.from_numpy(targets))


def _patterns(
    shape: tuple[int, ...], num_classes: int, random: np.random.Generator
) -> NDArray[np.float32]:
    """Return (num_classes, *shape) values of mean square 1."""
    if len(shape) != 3:
        patterns = random.standard_normal((num_classes, *shape), dtype=np.float32)
    else:
        channels, *size = shape
        coarse_size = [min(side, _PATTERN_SIDE) for side in size]
        coarse = random.standard_normal((num_classes, channels, *coarse_size), dtype=np.float32)
        patterns = F.interpolate(torch.from_numpy(coarse), size, mode="bilinear").numpy()
    patterns /= np.sqrt(np.mean(np.square(patterns)))
    return patterns


def _parse(options: str) -> _Options:
    shape: tuple[int, ...] | None = None
    counts: dict[str, int] = {}
    for item in options.split(",") if options else []:
        option = _OPTION.fullmatch(item)
        if option and option[1] not in counts:
            counts[option[1]] = int(option[2])
        elif _SHAPE.fullmatch(item) and shape is None:
            shape = tuple(map(int, item.split("x")))
        else:
            raise InvalidInput(f"cannot read {item!r} in 'synthetic:{options}': write {FORM}")
    return _checked(_Options(shape, counts.get("classes", 10), counts.get("samples", 512)))


def _checked(options: _Options) -> _Options:
    if options.num_classes < 2:
        raise InvalidInput("synthetic: classes must be at least 2, not 1")
    if options.num_train < options.num_classes:
        raise InvalidInput(
            f"synthetic: {options.num_train} samples cannot cover {options.num_classes} classes: "
            f"samples must be at least {options.num_classes}"
        )
    return options
