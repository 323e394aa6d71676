"""The four data sets of the Hogbatch paper by name, from files in a folder."""

import bz2
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from findings import numbers
from paceline.training.data import Dataset
from paceline.training.data.dataset import TensorSamples
from papers.hogbatch import DATA_SETS
from papers.hogbatch_files import PUBLISHED, load_published, parse_multilabel
from refusals import refused


def load(spec: str, shape: tuple[int, ...] | None = None, seed: int = 0) -> Dataset:
    name, _, folder = spec.partition(":")
    return load_published(name, folder, shape, seed)


def both(data: Dataset) -> tuple[torch.Tensor, torch.Tensor]:
    """All inputs and targets, those for training first."""
    parts = [data.train, data.test]
    assert all(isinstance(part, TensorSamples) for part in parts)
    return torch.cat([p.inputs for p in parts]), torch.cat([p.targets for p in parts])


def resize(monkeypatch: pytest.MonkeyPatch, name: str, **sizes: object) -> None:
    """Make the data set smaller than it is, for files that are quickly written."""
    monkeypatch.setitem(PUBLISHED, name, replace(PUBLISHED[name], **sizes))


@pytest.mark.parametrize("row", DATA_SETS, ids=lambda row: row.name)
def test_sizes_are_those_of_table_ii(row) -> None:
    known = PUBLISHED[row.name]
    sizes = (known.num_samples, known.num_features, known.num_classes)
    assert sizes == (row.num_examples, row.widths[0], row.widths[-1])


BINARY, PACKED, DELICIOUS = "covtype.libsvm.binary", "real-sim.bz2", "Delicious_data.txt"
COVTYPE = "1 1:0.25 3:1\n2 1:0 2:1\n1 1:1 2:0.5\n2 1:0.5 3:1\n1 2:0 3:0\n"


def test_covtype_scaled_or_not_packed_or_not_is_the_same(tmp_path, monkeypatch):
    resize(monkeypatch, "covtype", counts=(5,), num_features=3)
    raw = "1 1:102 3:7\n2 1:100 2:-1\n1 1:108 2:-2\n2 1:104 2:-3 3:7\n1 1:100 2:-3 3:0\n"
    scaled = "1 1:.25 2:1 3:1\n2 2:.6666667\n1 1:1 2:.33333334\n2 1:.5 3:1\n1 3:0\n"
    names = ("covtype.libsvm.binary", "covtype.libsvm.binary.scale")
    loaded = []
    for name, text in zip(names, (raw, scaled), strict=True):
        for file, content in ((name, text.encode()), (f"{name}.bz2", bz2.compress(text.encode()))):
            (tmp_path / file).write_bytes(content)
            loaded.append(both(load(f"covtype:{tmp_path}", seed=3)))
            (tmp_path / file).unlink()
    for inputs, targets in loaded:
        torch.testing.assert_close(inputs, loaded[0][0])
        assert torch.equal(targets, loaded[0][1])
    # A file that is scaled already keeps its bits.
    assert torch.equal(
        loaded[2][0].unique(), torch.tensor([0, 0.33333334, 0.25, 0.5, 0.6666667, 1]).unique()
    )


def delicious(folder: Path, num: int = 10) -> None:
    lines = [f"{i % 983},{(i + 1) % 983} {i % 500}:1\n" for i in range(num)]
    (folder / "Delicious_data.txt").write_text(f"{num} 500 983\n{''.join(lines)}")


def test_delicious_takes_the_repository_s_first_split(tmp_path, monkeypatch):
    resize(monkeypatch, "delicious", counts=(5,))
    delicious(tmp_path, 5)
    (tmp_path / "delicious_trSplit.txt").write_text("5 1\n1 2\n4 3\n")
    (tmp_path / "delicious_tstSplit.txt").write_text("2 4\n3 5\n")
    data = load(f"delicious:{tmp_path}")
    assert data.train.__getitems__(range(3))[0].argmax(1).tolist() == [4, 0, 3]
    assert data.test.__getitems__(range(2))[0].argmax(1).tolist() == [1, 2]


SPLIT = ("delicious_trSplit.txt", "delicious_tstSplit.txt")


@pytest.mark.parametrize(
    ("name", "sizes", "files", "faulty"),
    [
        # Of a split: a missing file, samples named twice, not at all, or that there are not, a word
        ("delicious", {"counts": (5,)}, {SPLIT[0]: "1\n2\n3\n"}, SPLIT[1]),
        ("delicious", {"counts": (5,)}, {SPLIT[0]: "1\n2\n3\n", SPLIT[1]: "4\n4\n"}, SPLIT[0]),
        ("delicious", {"counts": (5,)}, {SPLIT[0]: "1\n2\n3\n", SPLIT[1]: "4\n"}, SPLIT[0]),
        ("delicious", {"counts": (5,)}, {SPLIT[0]: "0\n2\n3\n", SPLIT[1]: "4\n5\n"}, SPLIT[0]),
        ("delicious", {"counts": (5,)}, {SPLIT[0]: "1\nx\n3\n", SPLIT[1]: "4\n5\n"}, SPLIT[0]),
        # Other samples, features or labels than the published ones, or a line that cannot be read
        ("covtype", {}, {BINARY: COVTYPE + "1 3:1\n"}, BINARY),
        ("covtype", {}, {BINARY: COVTYPE.replace("3:", "4:")}, BINARY),
        ("covtype", {}, {BINARY: COVTYPE.replace("2 1:0 ", "7 1:0 ")}, BINARY),
        ("covtype", {}, {BINARY: COVTYPE.replace("2 1", "-1 1")}, BINARY),
        ("covtype", {}, {BINARY: COVTYPE.replace("1:1 ", "1:one ")}, BINARY),
        ("delicious", {"counts": (4,)}, {}, DELICIOUS),
        ("delicious", {"counts": (5,), "num_features": 499}, {}, DELICIOUS),
        ("delicious", {"counts": (5,), "num_classes": 984}, {}, DELICIOUS),
        # Files that are not there, or are no bzip2 files
        ("real-sim", {}, {}, None),
        ("w8a", {"counts": (1, 1)}, {"w8a": "-1 300:1\n"}, None),
        ("real-sim", {}, {PACKED: bz2.compress(b"+1 1:1\n" * 1000)[:-9]}, PACKED),
        ("real-sim", {}, {PACKED: b"no" + bz2.compress(b"+1 1:1\n")}, PACKED),
    ],
)
def test_a_file_that_is_not_as_published_is_named(
    tmp_path, monkeypatch, name, sizes, files, faulty
):
    usual = {"counts": (5,), "num_features": 3} if name == "covtype" else {}
    resize(monkeypatch, name, **usual | sizes)
    if name == "delicious":
        delicious(tmp_path, 5)
    for file, content in files.items():
        (tmp_path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with refused(tmp_path / faulty if faulty else "data"):
        load(f"{name}:{tmp_path}")


def test_folders_and_models_that_do_not_fit_are_about_the_data(tmp_path, monkeypatch):
    for spec, shape in (
        (f"covtype:{tmp_path / 'nowhere'}", None),
        (f"w8a:{tmp_path}", (54,)),
    ):
        with refused("data"):
            load(spec, shape)
    # Refused before it is read: it takes 5.6 GiB.
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=5 * 2**30))
    (tmp_path / "real-sim").write_text("not read\n")
    with refused("data") as caught:
        load(f"real-sim:{tmp_path}")
    assert numbers(caught.value.problem)[:2] == [72309, 20958]
    assert numbers(caught.value.problem)[-2:] == [5.6, 5.0]


FORMATS = {
    # Of each data set: its file, the samples here, values of a line, and how one is written.
    "covtype": ("covtype.libsvm.binary", 400, 12, "{:.0f}"),
    "w8a": ("w8a", 300, 12, "1"),
    "delicious": ("Delicious_data.txt", 200, 18, "{:.6f}"),
    "real-sim": ("real-sim.bz2", 200, 52, "{:.17g}"),
}


@pytest.mark.parametrize("name", FORMATS)
def test_files_in_the_published_format_hold_what_was_written(name, tmp_path, monkeypatch):
    """Rows as in the published files, as wide as these: the arrays they were written of come back.

    LIBSVM's files end their lines with a space; the repository's have labels with commas.
    """
    known, (file, count, values, form) = PUBLISHED[name], FORMATS[name]
    resize(monkeypatch, name, counts=(count, 100) if known.test else (count,))
    total = PUBLISHED[name].num_samples
    generator = np.random.default_rng(5)
    inputs = np.zeros((total, known.num_features), np.float32)
    lines, labels = [], []
    for row in range(total):
        columns = np.sort(generator.choice(known.num_features, values, replace=False))
        texts = [form.format(value) for value in generator.uniform(0.01, 3000, values)]
        inputs[row, columns] = [np.float32(text) for text in texts]
        first = int(known.labels is not None)  # the repository counts from 0
        pairs = " ".join(f"{at + first}:{text}" for at, text in zip(columns, texts, strict=True))
        if known.labels is None:
            own = np.sort(generator.choice(known.num_classes, 1 + row % 25, replace=False))
            labels.append(own.tolist())
            lines.append(f"{','.join(map(str, own))} {pairs}\n")
        else:
            label = known.labels[row % 2]
            labels.append(row % 2)
            lines.append(f"{'+' if label > 0 and name != 'covtype' else ''}{label} {pairs} \n")
    head = f"{total} {known.num_features} {known.num_classes}\n" if known.labels is None else ""
    text = (head + "".join(lines[:count])).encode()
    (tmp_path / file).write_bytes(bz2.compress(text) if file.endswith(".bz2") else text)
    if known.test:
        (tmp_path / known.test).write_text("".join(lines[count:]))
    data = load(f"{name}:{tmp_path}")
    found, targets = both(data)
    assert len(data.test) == (total - count if known.test else count // 5)
    assert (data.sample_shape, data.num_classes) == ((inputs.shape[1],), known.num_classes)
    assert targets.dtype == (torch.bool if known.labels is None else torch.int64)
    if known.is_scaled:
        low, high = inputs.min(0), inputs.max(0)
        inputs = (inputs - low) / np.where(high > low, high - low, 1)
    # The split has its own order: rows are found again by their values.
    place = {row.tobytes(): number for number, row in enumerate(np.round(inputs, 4))}
    numbers = [place[row.tobytes()] for row in np.round(found.numpy(), 4)]
    assert sorted(numbers) == list(range(total))
    of_rows = [one.nonzero()[0].tolist() if one.ndim else int(one) for one in targets.numpy()]
    assert of_rows == [labels[number] for number in numbers]


def written(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


same_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
values32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
several = st.tuples(st.sets(st.integers(0, 8)), st.dictionaries(st.integers(0, 11), values32))


@given(st.lists(several, min_size=1, max_size=10), st.sampled_from(["\n", "\r\n"]), st.booleans())
@same_folder
def test_several_labels_are_parsed_as_a_naive_reader_would(tmp_path, samples, ending, packed):
    """They and the features count from 0."""
    text = f"{len(samples)} 12 9{ending}"
    features = np.zeros((len(samples), 12), np.float32)
    labels = np.zeros((len(samples), 9), bool)
    for number, (own, values) in enumerate(samples):
        words = [f"{index}:{value!r}" for index, value in sorted(values.items())]
        text += f"{','.join(map(str, own))} {' '.join(words)}{ending}"
        labels[number, list(own)] = True
        for index, value in values.items():
            features[number, index] = value
    path = tmp_path / ("x.bz2" if packed else "x")
    file = parse_multilabel(written(path, bz2.compress(text.encode()) if packed else text))
    assert (file.features.dtype, file.labels.dtype) == (np.float32, np.bool_)
    np.testing.assert_array_equal(file.features.toarray(), features)
    np.testing.assert_array_equal(file.labels, labels)


BAD_LABELS = ["0,x", "0,,1", "0,", "-1", "1.5", "1_0", "0:1", "3", "1,1"]  # of three labels
BAD_FEATURES = ["5:1", "4:1 5:1", "3:1 3:1", "2", "2:inf", "2:1 # note", "qid:3 2:1"]  # of five


@pytest.mark.parametrize(
    "line", [*(f"{labels} 1:1" for labels in BAD_LABELS), *(f"1 {rest}" for rest in BAD_FEATURES)]
)
def test_a_bad_line_of_several_labels_is_named_by_its_number(tmp_path: Path, line: str) -> None:
    path = written(tmp_path / "x", f"3 5 3\n0 1:1\n{line}\n2 1:1\n")
    with refused(path) as caught:
        parse_multilabel(path)
    assert caught.value.problem.startswith("line 3: ")


@pytest.mark.parametrize(
    "text",
    [
        *("", "\n0 1:1\n", "0 1:1\n", "1 2\n0 1:1\n", "1 0 3\n0 \n"),  # no header of three numbers
        *("3 5 3\n0 1:1\n", "1 5 3\n0 1:1\n1 1:1\n"),  # another number of samples
    ],
)
def test_a_header_that_does_not_fit_is_refused(tmp_path: Path, text: str) -> None:
    with refused(tmp_path / "x"):
        parse_multilabel(written(tmp_path / "x", text))
