"""Data sets by their spec strings, such as "digits" or "libsvm:PATH"."""

from paceline.core.errors import InvalidInput
from paceline.data.dataset import Dataset, shape_text
from paceline.data.digits import load_digits
from paceline.data.libsvm import load_libsvm
from paceline.data.lookalike import NAMES as LOOKALIKES
from paceline.data.lookalike import load_lookalike
from paceline.data.published import PUBLISHED, load_published
from paceline.data.synthetic import FORM as SYNTHETIC_FORM
from paceline.data.synthetic import load_synthetic

FORMS = (
    *("digits", "libsvm:PATH", "images:FOLDER", SYNTHETIC_FORM),
    *(f"{name}:FOLDER" for name in PUBLISHED),
    *LOOKALIKES,
)
_OPTIONAL = {"sklearn": "scikit-learn", "PIL": "Pillow"}


def load(spec: str, sample_shape: tuple[int, ...] | None = None, seed: int = 0) -> Dataset:
    """Return the data set that `spec` names, with samples of `sample_shape` (None: its own).

    Forms: `digits`, `libsvm:PATH`, `images:FOLDER` and `synthetic:3x224x224,classes=10,samples=512`
    (each part optional); `covtype:FOLDER` and the other names of `PUBLISHED`; `covtype-like` or
    `covtype-like:samples=5000` and the other names of `LOOKALIKES`. The seed decides the split and
    the synthetic values, so every rank must pass the same. Raises InvalidInput for an unknown form,
    a file that cannot be used, a shape that does not fit, or a missing optional package.
    """
    if sample_shape is not None and (not sample_shape or min(sample_shape) < 1):
        raise InvalidInput(
            f"a sample shape needs sizes of at least 1, not {shape_text(sample_shape) or 'none'}"
        )
    if seed < 0:
        raise InvalidInput(f"the seed must be 0 or more, not {seed}")
    try:
        return _load(spec, sample_shape, seed)
    except ModuleNotFoundError as error:
        package = _OPTIONAL.get((error.name or "").partition(".")[0])
        if package is None:
            raise
        raise InvalidInput(f"{spec} needs {package}: install paceline[data]") from error
    except OSError as error:
        raise InvalidInput(f"{spec} cannot be read: {error}") from error


def _load(spec: str, sample_shape: tuple[int, ...] | None, seed: int) -> Dataset:
    source, _, argument = spec.partition(":")
    if spec == "digits":
        return load_digits(sample_shape, seed)
    if source == "libsvm" and argument:
        return load_libsvm(argument, sample_shape, seed)
    if source == "images" and argument:
        from paceline.data.folders import load_images  # needs Pillow, which is optional

        return load_images(argument, sample_shape, seed)
    if source == "synthetic":
        return load_synthetic(argument, sample_shape, seed)
    if source in PUBLISHED and argument:
        return load_published(source, argument, sample_shape, seed)
    if source in LOOKALIKES:
        return load_lookalike(source, argument, sample_shape, seed)
    raise InvalidInput(f"no such data set: {spec!r}; write one of {', '.join(FORMS)}")
