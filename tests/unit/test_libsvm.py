import bz2
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.core.errors import InvalidInput
from paceline.data import Dataset, ShardedBatches, load, loader
from paceline.data.dataset import TensorSamples

GOOD = "+1 1:0.5 3:2\n-1 2:1\n+1 3:1\n-1 1:4\n"


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
    data = loaded(tmp_path / "small", GOOD)
    assert (data.name, data.num_classes, data.sample_shape) == ("small", 2, (3,))
    expected = [([0.5, 0, 2], 1), ([0, 1, 0], 0), ([0, 0, 1], 1), ([4, 0, 0], 0)]
    assert sorted(rows(data.train) + rows(data.test)) == sorted(expected)
    inputs, targets = data.train[0]
    assert (inputs.dtype, targets.dtype) == (torch.float32, torch.int64)


def test_split_takes_a_fifth_of_each_class(tmp_path: Path) -> None:
    data = loaded(tmp_path / "x", "".join(f"{i % 3} 1:{i}\n" for i in range(30)))
    assert [label for _, label in rows(data.test)].count(0) == 2
    assert (len(data.train), len(data.test)) == (24, 6)
    values = [values[0] for values, _ in rows(data.train) + rows(data.test)]
    assert sorted(values) == list(range(30))


def test_test_file_beside_it_is_used(tmp_path: Path) -> None:
    written(tmp_path / "x.t", "+1 4:1\n")
    data = loaded(tmp_path / "x", GOOD)
    assert (len(data.train), len(data.test), data.sample_shape) == (4, 1, (4,))
    assert rows(data.test) == [([0, 0, 0, 1], 1)]
    assert rows(data.train)[0] == ([0.5, 0, 2, 0], 1)


@pytest.mark.parametrize(("train", "test"), [("0 0:1\n1 1:2\n", "1 1:3\n"), (GOOD, "1 0:1\n")])
def test_an_index_of_zero_makes_both_files_count_from_zero(
    tmp_path: Path, train: str, test: str
) -> None:
    written(tmp_path / "x.t", test)
    data = loaded(tmp_path / "x", train)
    column = int(test.split()[1].split(":")[0])
    assert rows(data.test)[0][0][column] == float(test.split(":")[1])


def test_labels_become_classes_in_ascending_order(tmp_path: Path) -> None:
    data = loaded(tmp_path / "x", "10 1:10\n-3 1:-3\n7 1:7\n" * 2)
    classes = {values[0]: label for values, label in rows(data.train)}
    assert classes == {-3: 0, 7: 1, 10: 2}


def test_comments_and_empty_lines(tmp_path: Path) -> None:
    text = f"# qid:1 is only a comment here\n\n{GOOD.replace('2:1', '2:1 # one 9:9')}\r\n"
    data = loaded(tmp_path / "x", text)
    assert (len(data.train) + len(data.test), data.sample_shape) == (4, (3,))


def test_sample_shape_pads_the_zeros_that_the_format_leaves_out(tmp_path: Path) -> None:
    data = loaded(tmp_path / "x", GOOD, (1, 2, 2))
    inputs = torch.stack([data.train[i][0] for i in range(len(data.train))])
    assert inputs.shape == (2, 1, 2, 2)
    assert not inputs[:, 0, 1, 1].any()


def test_through_the_loader(tmp_path: Path) -> None:
    data = loaded(tmp_path / "x", GOOD * 5)
    batches = ShardedBatches(len(data.train), 4, 1, 2, seed=0)
    assert [inputs.shape for inputs, _ in loader(data.train, batches)] == [(2, 3)] * 4


values32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
lines = st.tuples(st.integers(-5, 5), st.dictionaries(st.integers(1, 30), values32))


@given(st.lists(lines, min_size=1, max_size=12))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_parsed_as_a_naive_reader_would(
    tmp_path: Path, samples: list[tuple[int, dict[int, float]]]
) -> None:
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


broken = st.lists(
    st.sampled_from([b"1", b"-1", b" ", b"\n", b":", b"3", b".5", b"#", b"qid:", b"nan", b"\x00"])
    | st.binary(max_size=3),
    max_size=25,
)


@given(broken)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_bytes_load_or_are_refused_in_one_line(tmp_path: Path, pieces: list[bytes]) -> None:
    try:
        data = loaded(tmp_path / "x", GOOD.encode() + b"".join(pieces))
    except InvalidInput as error:
        message = str(error)
    else:
        inputs, _ = data.train.__getitems__(range(len(data.train)))
        assert inputs.isfinite().all()
        return
    assert str(tmp_path / "x") in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("+1 1:0.5 2", "'2' is not index:value"),
        ("+1 1:0.5 x:2", "'x:2' is not index:value"),
        ("+1 1:0.5 2:x", "'2:x' is not index:value"),
        ("1:0.5 2:1", "label '1:0.5' is not a number"),
        ("1,2 1:1", "label '1,2' is not a number"),
        ("0.37 1:1", "label '0.37' is not a whole number"),
        ("nan 1:1", "label 'nan' is not a whole number"),
        ("+1 3:1 2:1", "index of '2:1' is not from 4 to"),
        ("+1 3:1 3:1", "index of '3:1' is not from 4 to"),
        ("+1 -1:1", "index of '-1:1' is not from 0 to"),
        ("+1 99999999999:1", "index of '99999999999:1' is not from 0 to"),
        ("+1 1:nan", "value of '1:nan' is not a finite float32"),
        ("+1 1:1e39", "value of '1:1e39' is not a finite float32"),
        ("+1 qid:3 1:1", "'qid:3' is not index:value"),
        ("\x7fELF\x00\x01", "label .* is not a number"),
        ("+1 " + "y" * 1000, r"'y{40}\.\.\.' is not index:value"),
    ],
)
@pytest.mark.parametrize("suffix", ["", ".t"])
def test_bad_line_is_named_by_its_number(
    tmp_path: Path, line: str, message: str, suffix: str
) -> None:
    path = tmp_path / "x"
    written(path, GOOD)
    bad = written(tmp_path / f"x{suffix}", f"# comment\n{GOOD}\n{line}\n{GOOD}")
    with pytest.raises(InvalidInput, match=rf"{bad}, line 7: .*{message}.*; a valid line: '\+1 3"):
        load(f"libsvm:{path}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "x has no samples; a valid line looks like"),
        ("# nothing\n\n", "x has no samples; a valid line looks like"),
        ("1\n2\n", "x has labels only; a valid line looks like"),
        ("1 1:1\n1 1:2\n", r"x has one class only \(label 1\)"),
        ("1 1:1\n2 1:2\n", "no class has two samples"),
        (
            "1 2000000000:1\n2 1:1\n" * 500,
            r"x has the feature 2,000,000,000: dense values would take",
        ),
    ],
)
def test_bad_file(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        loaded(tmp_path / "x", text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"x\.t has no samples"),
        ("5 1:1\n", r"x\.t has the label 5, which .*x has not"),
        ("1 9:1\n", "has 9 features, but the sample shape 4 holds 4"),
    ],
)
def test_bad_test_file(tmp_path: Path, text: str, message: str) -> None:
    written(tmp_path / "x.t", text)
    with pytest.raises(InvalidInput, match=message):
        loaded(tmp_path / "x", GOOD, (4,))


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"cannot be read.*No such file.*nowhere"):
        load(f"libsvm:{tmp_path / 'nowhere'}")
    with pytest.raises(InvalidInput, match=r"cannot be read.*Is a directory"):
        load(f"libsvm:{tmp_path}")


def test_bzip2_files_are_read_as_they_are(tmp_path: Path) -> None:
    written(tmp_path / "x.t.bz2", bz2.compress(b"+1 4:1\n"))
    data = loaded(tmp_path / "x.bz2", bz2.compress(GOOD.encode()))
    assert (data.name, len(data.train), data.sample_shape) == ("x", 4, (4,))
    assert rows(data.test) == [([0, 0, 0, 1], 1)]
    with pytest.raises(InvalidInput, match=r"y\.bz2, line 2: .*index:value"):
        loaded(tmp_path / "y.bz2", bz2.compress(b"+1 1:1\n-1 x\n"))


def test_compressed_otherwise_or_damaged(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"x\.gz is compressed: unpack it first"):
        loaded(tmp_path / "x.gz", b"")
    with pytest.raises(InvalidInput, match=r"x\.bz2 is damaged, or no bzip2 file"):
        loaded(tmp_path / "x.bz2", b"BZh9")
