"""The parser of files with several labels on a line."""

import bz2
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.core.errors import InvalidInput
from paceline.data.published import parse_multilabel

GOOD = "4 5 3\n0,2 0:0.5 3:1\n1 4:2\n 1:1\n2,1,0 \n"


def written(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("packed", [False, True])
def test_labels_and_features_count_from_zero(tmp_path: Path, ending: str, packed: bool) -> None:
    text = GOOD.replace("\n", ending).encode()
    path = tmp_path / ("x.bz2" if packed else "x")
    file = parse_multilabel(written(path, bz2.compress(text) if packed else text))
    assert file.features.toarray().tolist() == [
        [0.5, 0, 0, 1, 0],
        [0, 0, 0, 0, 2],
        [0, 1, 0, 0, 0],
        [0, 0, 0, 0, 0],
    ]
    assert (file.features.dtype, file.labels.dtype) == (np.float32, np.bool_)
    assert [np.flatnonzero(row).tolist() for row in file.labels] == [[0, 2], [1], [], [0, 1, 2]]


samples = st.tuples(
    st.sets(st.integers(0, 8)),
    st.dictionaries(st.integers(0, 11), st.floats(width=32, allow_nan=False, allow_infinity=False)),
)


@given(st.lists(samples, min_size=1, max_size=10))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_parsed_as_a_naive_reader_would(tmp_path: Path, rows) -> None:
    text = f"{len(rows)} 12 9\n"
    features, labels = np.zeros((len(rows), 12), np.float32), np.zeros((len(rows), 9), bool)
    for number, (own, values) in enumerate(rows):
        words = [f"{index}:{value!r}" for index, value in sorted(values.items())]
        text += f"{','.join(map(str, own))} {' '.join(words)}\n"
        labels[number, list(own)] = True
        for index, value in values.items():
            features[number, index] = value
    file = parse_multilabel(written(tmp_path / "x", text))
    np.testing.assert_array_equal(file.features.toarray(), features)
    np.testing.assert_array_equal(file.labels, labels)


broken = st.lists(
    st.sampled_from([b"1", b"-", b",", b" ", b"\n", b":", b"0:1", b"#", b"qid:1", b"nan", b"\x00"])
    | st.binary(max_size=3),
    max_size=20,
)


@given(broken)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_bytes_are_read_or_refused_in_one_line(tmp_path: Path, pieces: list[bytes]) -> None:
    body = b"".join(pieces)
    text = b"%d 5 3\n0 1:1\n%s\n" % (2 + body.count(b"\n"), body)
    try:
        file = parse_multilabel(written(tmp_path / "x", text))
    except InvalidInput as error:
        assert str(tmp_path / "x") in str(error)
        assert "\n" not in str(error)
        return
    assert np.isfinite(file.features.data).all()
    assert file.features.shape == (2 + body.count(b"\n"), 5)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("0,x 1:1", "the label 'x' is not a number"),
        ("0,,1 1:1", "the label '' is not a number"),
        ("0, 1 1:1", "the label '' is not a number"),
        ("-1 1:1", "the label '-1' is not a number"),
        ("1.5 1:1", "the label '1.5' is not a number"),
        ("1_0 1:1", "the label '1_0' is not a number"),
        ("0:1 1:1", "the label '0:1' is not a number"),
        ("3 1:1", "the label 3 is not from 0 to 2"),
        ("1,1 1:1", "the label 1 stands there twice"),
        ("1 5:1", "the index of '5:1' is not from 0 to 4"),
        ("1 4:1 5:1", "the index of '5:1' comes after the highest, 4"),
        ("1 3:1 3:1", "the index of '3:1' is not from 4 to 4"),
        ("1 2", "'2' is not index:value"),
        ("1 2:inf", "the value of '2:inf' is not a finite float32"),
        ("1 2:1 # note", "'#' is not index:value"),
        ("1 qid:3 2:1", "'qid:3' is not index:value"),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path: Path, line: str, message: str) -> None:
    path = written(tmp_path / "x", f"3 5 3\n0 1:1\n{line}\n2 1:1\n")
    with pytest.raises(InvalidInput, match=rf"{path}, line 3: .*{message}; a valid line: '12,40"):
        parse_multilabel(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: '' is not a header"),
        ("\n0 1:1\n", "line 1: '' is not a header"),
        ("0 1:1\n", "line 1: '0 1:1' is not a header; a valid one: '16105 500 983'"),
        ("1 2\n0 1:1\n", "line 1: '1 2' is not a header"),
        ("1 0 3\n0 \n", "line 1: each number must be at least 1, not 0"),
        ("3 5 3\n0 1:1\n", "has 1 samples, but its header says 3"),
        ("1 5 3\n0 1:1\n1 1:1\n", "has 2 samples, but its header says 1"),
    ],
)
def test_a_header_that_does_not_fit(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        parse_multilabel(written(tmp_path / "x", text))
