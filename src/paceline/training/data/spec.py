"""Load a data set by its name, such as "digits", "libsvm:PATH" or "synthetic:3x224x224"."""

import re
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from paceline.core.errors import InvalidInput, shown
from paceline.core.names import not_known
from paceline.training.data.dataset import Dataset, Shape, TensorSamples, require_memory, shape_text
from paceline.training.data.libsvm import load_libsvm
from paceline.training.data.sampler import stratified_split
from paceline.training.data.text import load_masked_text, load_text, load_tokens

_SIDE = 8
_SYNTHETIC = "synthetic:3x224x224,classes=10,samples=512"
FORMS = (
    *("digits", "libsvm:PATH", "images:FOLDER", _SYNTHETIC),
    *("text", "text:PATH", "masked-text", "masked-text:PATH", "tokens:PATH"),
)
_NUMBER = "[1-9][0-9]{0,8}"
_SHAPE = re.compile(f"{_NUMBER}(x{_NUMBER})*")
_OPTION = re.compile(f"(classes|samples)=({_NUMBER})")
_PATTERN_SIDE = 4  # pixels; patterns are drawn this small and enlarged, to survive pooling


def load_digits(sample_shape: Shape | None, seed: int) -> Dataset:
    """Load scikit-learn's handwritten digits, scaled to mean 0 and standard deviation 1.

    `sample_shape`: (1, 8, 8) by default; (64,) for flat pixels; or (1, H, W) or (3, H, W), for
    images resized to HxW pixels. `seed` determines the split into training and test samples.
    """
    shape = sample_shape or (1, _SIDE, _SIDE)
    is_flat = shape == (_SIDE * _SIDE,)
    if not is_flat and (len(shape) != 3 or shape[0] not in (1, 3)):
        problem = f"must be {_SIDE * _SIDE}, 1xHxW or 3xHxW for data digits"
        raise InvalidInput("input_shape", problem, got=shape_text(shape))
    # scikit-learn is optional; `load` turns the ImportError into InvalidInput
    from sklearn import datasets

    bunch = datasets.load_digits()
    train, test = stratified_split(bunch.target.astype("int64"), seed)
    require_memory(len(bunch.target), (1, *shape[1:]))
    pixels = torch.as_tensor(bunch.images, dtype=torch.float32).unsqueeze(1)
    pixels = (pixels - pixels[train].mean()) / pixels[train].std(correction=0)
    targets = torch.as_tensor(bunch.target, dtype=torch.int64)

    def part(rows: NDArray[np.int64]) -> TensorSamples:
        inputs = pixels[rows]
        if is_flat:
            return TensorSamples(inputs.flatten(1), targets[rows])
        channels, *size = shape
        if size != [_SIDE, _SIDE]:
            inputs = F.interpolate(inputs, size, mode="bilinear", align_corners=False)
        # Expanding a channel to three channels uses no memory until a batch is read.
        return TensorSamples(inputs.expand(-1, channels, -1, -1), targets[rows])

    return Dataset("digits", part(train), part(test), 10, shape)


def load_synthetic(options: str, sample_shape: Shape | None, seed: int) -> Dataset:
    """Generate training and test samples in a ratio of 4 to 1.

    `options`: such as "3x224x224,classes=10,samples=512", where 512 is the number of training
    samples. A sample is the sum of its class's pattern and Gaussian noise of the same power, scaled
    to a mean square of about 1. Classes are equally frequent. Patterns of CxHxW samples are smooth.
    """
    shape, num_classes, num_train = _parse(options)
    if shape and sample_shape and shape != sample_shape:
        problem = f"must have the model's input shape {shape_text(sample_shape)}"
        hint = "omit the shape"
        raise InvalidInput("data", problem, got=f"synthetic:{options}", hint=hint)
    shape = shape or sample_shape or (3, 224, 224)
    num_samples = num_train + -(-num_train // 4)
    require_memory(num_samples, shape)

    random = np.random.default_rng(seed)
    # Class patterns, (num_classes, *shape); image patterns are upsampled from coarse ones.
    coarse = (shape[0], *(min(side, _PATTERN_SIDE) for side in shape[1:]))
    is_image = len(shape) == 3
    size = coarse if is_image else shape
    patterns = random.standard_normal((num_classes, *size), dtype=np.float32)
    if is_image:
        patterns = F.interpolate(torch.from_numpy(patterns), shape[1:], mode="bilinear").numpy()
    patterns /= np.sqrt(np.mean(np.square(patterns)))

    def draw(count: int) -> TensorSamples:
        targets = random.permutation(np.arange(count) % num_classes)
        inputs = random.standard_normal((count, *shape), dtype=np.float32)
        for sample, target in zip(inputs, targets, strict=True):
            sample += patterns[target]  # patterns[targets] would double the memory
        inputs *= np.float32(0.5**0.5)
        return TensorSamples(torch.from_numpy(inputs), torch.from_numpy(targets))

    train, test = draw(num_train), draw(num_samples - num_train)
    return Dataset("synthetic", train, test, num_classes, shape)


def _parse(options: str) -> tuple[Shape | None, int, int]:
    """Return the sample shape (None: not given), and the numbers of classes and samples."""
    shape: Shape | None = None
    counts: dict[str, int] = {}
    for item in options.split(",") if options else []:
        option = _OPTION.fullmatch(item)
        if option and option[1] not in counts:
            counts[option[1]] = int(option[2])
        elif _SHAPE.fullmatch(item) and shape is None:
            shape = tuple(map(int, item.split("x")))
        else:
            hint = f"write {_SYNTHETIC}"
            raise InvalidInput("data", f"cannot contain {shown(item)}", hint=hint)
    num_classes, num_train = counts.get("classes", 10), counts.get("samples", 512)
    if num_classes < 2:
        raise InvalidInput("data", "must have classes=2 or more", got=f"synthetic:{options}")
    if num_train < num_classes:
        problem = f"must have samples={num_classes} or more, one for each class"
        raise InvalidInput("data", problem, got=f"synthetic:{options}")
    return shape, num_classes, num_train


def _load_images(folder: str, sample_shape: Shape | None, seed: int) -> Dataset:
    from paceline.training.data.images import load_images  # needs Pillow, which is optional

    return load_images(folder, sample_shape, seed)


_Load = Callable[[str, Shape | None, int], Dataset]
_OF_PATH: dict[str, _Load] = {
    "libsvm": load_libsvm,
    "images": _load_images,
    "tokens": load_tokens,
    "text": load_text,
    "masked-text": load_masked_text,
}
_WITHOUT_PATH = ("text", "masked-text")
_OPTIONAL = {"sklearn": "scikit-learn", "PIL": "Pillow"}


def load(spec: str, sample_shape: Shape | None = None, seed: int = 0) -> Dataset:
    """Load a data set by its name, such as "digits" or "images:FOLDER".

    `spec`: one of `FORMS`; every option after "synthetic" may be omitted. `sample_shape`: None
    selects the data set's default shape. `seed` determines the split into training and test
    samples, masked positions and synthetic values; all ranks must pass the same seed. Raises
    InvalidInput for an unknown name, an unusable file, an unsuitable shape, or a missing optional
    package.
    """
    if sample_shape is not None and (not sample_shape or min(sample_shape) < 1):
        problem = "must have sizes of at least 1"
        raise InvalidInput("input_shape", problem, got=shape_text(sample_shape))
    if seed < 0:
        raise InvalidInput("seed", "must be 0 or more", got=seed)
    source, _, argument = spec.partition(":")
    try:
        if spec == "digits":
            return load_digits(sample_shape, seed)
        if source == "synthetic":
            return load_synthetic(argument, sample_shape, seed)
        if source in _OF_PATH and (argument or spec in _WITHOUT_PATH):
            return _OF_PATH[source](argument, sample_shape, seed)
    except ModuleNotFoundError as error:
        package = _OPTIONAL.get((error.name or "").partition(".")[0])
        if package is None:
            raise
        problem, hint = f"{spec} requires {package}", "install paceline[data]"
        raise InvalidInput("data", problem, hint=hint) from error
    except OSError as error:
        raise InvalidInput("data", f"{spec}: {error}") from error
    raise not_known("data", spec, FORMS)
