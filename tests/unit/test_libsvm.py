"""Text files of sparse samples in LIBSVM's format."""

import bz2
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.training.data import Dataset, load
from paceline.training.data.dataset import TensorSamples
from refusals import refused

GOOD = "+1 1:0.5 3:2\n-1 2:1\n+1 3:1\n-1 1:4\n"
same_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def written(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def loaded(path: Path, text: str | bytes, shape: tuple[int, ...] | None = None) -> Dataset:
    return load(f"libsvm:{written(path, text)}", shape)


def rows(samples: object) -> list[tuple[list[float], int]]:
    """All samples, as (flat values, class)."""
    assert isinstance(samples, TensorSamples)
    inputs = samples.inputs.flatten(1).tolist()
    return list(zip(inputs, samples.targets.tolist(), strict=True))


def test_values_and_classes(tmp_path: Path) -> None:
    commented = f"# qid:1 is only a comment here\n\n{GOOD.replace('2:1', '2:1 # one 9:9')}\r\n"
    for text in (GOOD, commented):
        data = loaded(tmp_path / "small", text)
        assert (data.name, data.num_classes, data.sample_shape) == ("small", 2, (3,))
        expected = [([0.5, 0, 2], 1), ([0, 1, 0], 0), ([0, 0, 1], 1), ([4, 0, 0], 0)]
        assert sorted(rows(data.train) + rows(data.test)) == sorted(expected)
    inputs, targets = data.train[0]
    assert (inputs.dtype, targets.dtype) == (torch.float32, torch.int64)


def test_a_test_file_in_the_same_folder_is_used(tmp_path: Path) -> None:
    written(tmp_path / "x.t", "+1 4:1\n")
    data = loaded(tmp_path / "x", GOOD)
    assert (len(data.train), len(data.test), data.sample_shape) == (4, 1, (4,))
    assert rows(data.test) == [([0, 0, 0, 1], 1)]
    assert rows(data.train)[0] == ([0.5, 0, 2, 0], 1)


@pytest.mark.parametrize(("train", "test"), [("0 0:1\n1 1:2\n", "1 1:3\n"), (GOOD, "1 0:1\n")])
def test_an_index_of_zero_in_one_file_makes_both_count_from_zero(tmp_path, train, test):
    written(tmp_path / "x.t", test)
    data = loaded(tmp_path / "x", train)
    column = int(test.split()[1].split(":")[0])
    assert rows(data.test)[0][0][column] == float(test.split(":")[1])


def test_a_sample_shape_pads_the_zeros_that_the_format_leaves_out(tmp_path: Path) -> None:
    data = loaded(tmp_path / "x", GOOD, (1, 2, 2))
    inputs = torch.stack([data.train[i][0] for i in range(len(data.train))])
    assert inputs.shape == (2, 1, 2, 2)
    assert not inputs[:, 0, 1, 1].any()


values32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
lines = st.tuples(st.integers(-5, 5), st.dictionaries(st.integers(1, 30), values32))


@given(st.lists(lines, min_size=1, max_size=12))
@same_folder
def test_lines_are_parsed_as_a_naive_reader_would(tmp_path: Path, samples) -> None:
    # Two fixed lines make every draw a valid file with two classes.
    samples = [*samples, (-9, {31: 1.0}), (9, {1: -1.0})]
    text = "".join(
        " ".join([str(label), *(f"{i}:{v!r}" for i, v in sorted(features.items()))]) + "\n"
        for label, features in samples
    )
    written(tmp_path / "x.t", text)
    data = loaded(tmp_path / "x", text)

    expected = np.zeros((len(samples), 31), np.float32)
    for row, (_, features) in enumerate(samples):
        for index, value in features.items():
            expected[row, index - 1] = value
    classes = sorted({label for label, _ in samples})
    for part in (data.train, data.test):
        inputs, targets = part.__getitems__(range(len(samples)))
        np.testing.assert_array_equal(inputs.numpy(), expected)
        assert [classes[target] for target in targets] == [label for label, _ in samples]


# A bad line, and the part of it that the error shows.
BAD_LINES = [
    *(("+1 1:0.5 2", "'2'"), ("+1 1:0.5 x:2", "'x:2'"), ("+1 1:0.5 2:x", "'2:x'")),
    *(("1:0.5 2:1", "'1:0.5'"), ("1,2 1:1", "'1,2'"), ("0.37 1:1", "'0.37'"), ("nan 1:1", "'nan'")),
    *(("+1 3:1 2:1", "'2:1'"), ("+1 3:1 3:1", "'3:1'"), ("+1 -1:1", "'-1:1'")),
    ("+1 99999999999:1", "'99999999999:1'"),
    *(("+1 1:nan", "'1:nan'"), ("+1 1:1e39", "'1:1e39'"), ("+1 qid:3 1:1", "'qid:3'")),
    ("\x7fELF\x00\x01", "ELF"),
    ("+1 " + "y" * 1000, f"'{'y' * 40}...'"),
]


@pytest.mark.parametrize(("line", "shown"), BAD_LINES)
@pytest.mark.parametrize("suffix", ["", ".t"])
def test_a_bad_line_is_named_by_its_number(tmp_path: Path, line, shown, suffix) -> None:
    path = written(tmp_path / "x", GOOD)
    bad = written(tmp_path / f"x{suffix}", f"# comment\n{GOOD}\n{line}\n{GOOD}")
    with refused(bad) as caught:
        load(f"libsvm:{path}")
    place, _, fault = caught.value.problem.partition(": ")
    assert place == "line 7"
    assert shown in fault


@pytest.mark.parametrize(
    ("name", "train", "test", "field"),
    [
        ("x", "", None, "x"),
        ("x", "# nothing\n\n", None, "x"),
        ("x", "1\n2\n", None, "x"),  # only labels
        ("x", "1 1:1\n1 1:2\n", None, "x"),  # one class
        ("x", "1 1:1\n2 1:2\n", None, "data"),  # no class of two samples
        ("x", "1 2000000000:1\n2 1:1\n" * 500, None, "x"),  # far larger as dense values
        ("x", GOOD, "", "x.t"),
        ("x", GOOD, "5 1:1\n", "x.t"),  # a class without training samples
        ("x", GOOD, "1 9:1\n", "x"),  # more features than the sample shape
        ("x.gz", "", None, "x.gz"),
        ("x.bz2", b"BZh9", None, "x.bz2"),
    ],
)
def test_a_file_without_usable_samples_is_refused(tmp_path: Path, name, train, test, field) -> None:
    if test is not None:
        written(tmp_path / f"{name}.t", test)
    with refused(field if field == "data" else tmp_path / field):
        loaded(tmp_path / name, train, None if test is None else (4,))


def test_bzip2_files_are_read_without_unpacking(tmp_path: Path) -> None:
    written(tmp_path / "x.t.bz2", bz2.compress(b"+1 4:1\n"))
    data = loaded(tmp_path / "x.bz2", bz2.compress(GOOD.encode()))
    assert (data.name, len(data.train), data.sample_shape) == ("x", 4, (4,))
    assert rows(data.test) == [([0, 0, 0, 1], 1)]
    with refused(tmp_path / "y.bz2") as caught:
        loaded(tmp_path / "y.bz2", bz2.compress(b"+1 1:1\n-1 x\n"))
    assert caught.value.problem.startswith("line 2: ")
