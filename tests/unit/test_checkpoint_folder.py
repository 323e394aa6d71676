"""Checkpoint folders survive damage, killed writers and full disks."""

import json
import math
import os
import re
import resource
import shutil
import signal
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from faults import failpoints
from paceline.checkpoints import manifest
from paceline.checkpoints.folder import CheckpointFolder, Loaded
from paceline.core.errors import CheckpointNotWritten
from refusals import refused

FILES = ["manifest.json", "model.safetensors", "progress.json", "rank1.safetensors"]
NEWEST = "step-00000002"


def values_of(step: int) -> Tensor:
    return torch.arange(300, dtype=torch.float32) * step


def contents_of(step: int) -> tuple[dict, dict]:
    tensors = {"model/weight": values_of(step), "model/count": torch.tensor(step)}
    values = {"epoch": step, "loss": math.inf, "betas": (0.9, 0.99)}
    return tensors | {"rank1/error": -values_of(step)}, {"progress": values}


def check(loaded: Loaded | None, step: int, values: int | None = None) -> Loaded:
    """Assert that the checkpoint of `step` has `contents_of(values)`, by default of `step`."""
    assert loaded is not None
    values = step if values is None else values
    assert loaded.step == step
    assert sorted([*loaded.names, "manifest.json"]) == FILES
    (tensors, parts), (wanted, wanted_parts) = loaded.read(), contents_of(values)
    assert tensors.keys() == wanted.keys()
    assert all(torch.equal(one, wanted[name]) for name, one in tensors.items())
    assert parts == wanted_parts
    return loaded


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write(path: Path, *steps: int, keep: int = 2) -> CheckpointFolder:
    folder = CheckpointFolder(path, keep)
    for step in steps:
        folder.write(step, *contents_of(step))
    return folder


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("written") / "checkpoints", 1, 2).path


def skipped(path: Path) -> str:
    """Return why the newest checkpoint was skipped."""
    (line,) = check(CheckpointFolder(path).latest(), 1).skipped
    assert "\n" not in line
    return line


@pytest.fixture
def written(original: Path, tmp_path: Path) -> Path:
    """A folder with checkpoints of steps 1 and 2."""
    return Path(shutil.copytree(original, tmp_path / "checkpoints"))


@pytest.mark.parametrize(
    ("steps", "keep", "left"),
    [
        ((2, 9, 10, 11), 1, (11,)),
        ((500, 1000, 100_000_000), 2, (1000, 100_000_000)),
        ((2, 9, 10, 11), 3, (9, 10, 11)),
        ((4, 5, 6, 5), 3, (4, 5)),  # a run resumed from step 4 removes the checkpoints after 5
        ((7, 7), 1, (7,)),
    ],
)
def test_the_newest_checkpoints_are_kept(tmp_path, steps, keep: int, left) -> None:
    folder = CheckpointFolder(tmp_path / "runs" / "1" / "checkpoints", keep)
    assert folder.latest() is None
    for step in steps:
        assert folder.write(step, *contents_of(step)) == folder.path / f"step-{step:08d}"
        assert check(folder.latest(), step).skipped == ()
    assert folder.steps == left
    assert names(folder.path) == [f"step-{one:08d}" for one in left]


def killed(function: Callable[[], object], failpoint: str) -> None:
    """Run a function in a forked process that is killed at the failpoint."""
    with failpoints({"at": failpoint, "do": "SIGKILL"}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about forking a process with threads
        child = os.fork()
        if not child:
            try:
                function()
            finally:
                os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


@pytest.mark.parametrize(
    ("moment", "step", "is_new"),
    [
        ("checkpoint.file", 8, False),
        ("checkpoint.replacing", 7, False),
        ("checkpoint.named", 7, True),
        ("checkpoint.named", 8, True),
        ("checkpoint.removing", 7, True),
        ("checkpoint.removing", 8, True),
    ],
)
def test_a_killed_writer_leaves_a_whole_checkpoint(
    tmp_path: Path, moment: str, step: int, is_new: bool
) -> None:
    """The only earlier checkpoint is of step 7; a new checkpoint of step 7 replaces it."""
    folder = write(tmp_path, 7, keep=1)
    (tmp_path / ".partial-file").touch()
    killed(lambda: folder.write(step, *contents_of(100)), moment)
    again = CheckpointFolder(tmp_path, keep=1)
    loaded = check(again.latest(), step if is_new else 7, 100 if is_new else 7)
    assert loaded.skipped == ()
    again.write(9, *contents_of(9))
    check(again.latest(), 9)
    assert names(tmp_path) == ["step-00000009"]


# Damage


@given(st.sampled_from(FILES), st.booleans(), st.data())
def test_a_changed_bit_or_a_cut_is_found(original: Path, name: str, is_cut: bool, data) -> None:
    file = original / NEWEST / name
    content = file.read_bytes()
    at, bit = divmod(data.draw(st.integers(0, 8 * len(content) - 1)), 8)
    rest = b"" if is_cut else bytes([content[at] ^ 1 << bit]) + content[at + 1 :]
    try:
        file.write_bytes(content[:at] + rest)
        assert f"{NEWEST}: {name} " in skipped(original)
    finally:
        file.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        Path.unlink,
        lambda file: file.write_bytes(file.read_bytes() + b"\n"),
        lambda file: (file.unlink(), file.mkdir()),
        lambda file: (file.unlink(), os.mkfifo(file)),
    ],
    ids=["missing", "longer", "folder", "pipe"],
)
@pytest.mark.parametrize("name", FILES)
def test_other_damage_is_found(written: Path, name: str, damage: Callable[[Path], object]) -> None:
    damage(written / NEWEST / name)
    assert f"{NEWEST}: {name} " in skipped(written)


def test_a_folder_of_another_steps_name_is_damaged(written: Path) -> None:
    (written / NEWEST).rename(written / "step-00000003")
    assert skipped(written)
    shutil.rmtree(written / "step-00000001")
    with refused(written):
        CheckpointFolder(written).latest()


# Other files and folders


def forge(folder: Path, **fields: object) -> None:
    known = {"format_version": 1, "step": 2, "files": {}} | fields
    head = json.dumps(known, indent=1).removesuffix("\n}").encode() + b",\n"
    (folder / "manifest.json").write_bytes(head + manifest._last_line(head))


def test_a_newer_format_is_refused(written: Path) -> None:
    forge(written / NEWEST, format_version=2)
    with refused(written / NEWEST) as caught:
        CheckpointFolder(written).latest()
    assert caught.value.hint


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "..", "a/b.json", ".json", "manifest.json", "x"]
)
def test_no_other_file_is_read_or_written(written: Path, name: str) -> None:
    forge(written / NEWEST, files={name: {"nbytes": 0, "crc32": "00000000"}})
    assert repr(name) in skipped(written)
    part = name.removesuffix(".json")
    if part != "x":  # which is stored in x.json
        with pytest.raises(ValueError, match=re.escape(f"{part}.json")):
            CheckpointFolder(written).write(3, {}, {part: {}})
    assert names(written) == ["step-00000001", NEWEST]


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        (b'"step": 2', b'"step": "many"', "step"),
        (b'"step": 2', b'"step": 2, "owner": 2', "owner"),
        (b'"format_version": 1', b'"format_version": 0', "format"),
        (b'"format_version": 1', b'"format_version": "1"', "format"),
        (b'"format_version": 1', b'"version": 1', "version"),
        (b'"format_version": 1,', b"", "format_version"),
        (b'"files": {', b'"files": [], "other": {', "files"),
    ],
)
def test_a_manifest_with_wrong_fields_is_skipped(written: Path, old, new, named: str) -> None:
    file = written / NEWEST / "manifest.json"
    head = file.read_bytes().rpartition(b' "crc32"')[0]
    assert old in head
    head = head.replace(old, new)
    file.write_bytes(head + manifest._last_line(head))
    assert named in skipped(written)


def test_a_folder_with_other_files_is_refused(tmp_path: Path, original: Path) -> None:
    (tmp_path / ".hidden").touch()
    assert CheckpointFolder(tmp_path).latest() is None
    (tmp_path / "holiday.jpg").touch()
    for path in (tmp_path, tmp_path / "holiday.jpg", original / "step-00000001"):
        with refused(path):
            CheckpointFolder(path).latest()


# Failed writes


@pytest.mark.parametrize(
    ("tensors", "values", "field"),
    [
        ({"a/w": torch.ones(2, dtype=torch.complex64)}, {}, "w"),
        ({"a/w": torch.eye(2).to_sparse()}, {}, "w"),
        ({"a/w": 3}, {}, "w"),
        ({}, {"hook": [print]}, "a.hook[0]"),
    ],
)
def test_unsupported_values_are_refused_and_leave_no_files(
    tmp_path: Path, tensors, values, field: str
) -> None:
    folder = write(tmp_path, 1)
    with refused(field):
        folder.write(2, tensors, {"b": {}, "a": values})
    assert names(tmp_path) == ["step-00000001"]


def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    """Simulate a full disk: the second of two files exceeds the limit of 1 KiB."""
    folder, before = write(tmp_path, 1), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 10, before[1]))
    try:
        with pytest.raises(CheckpointNotWritten) as caught:
            folder.write(2, {"model/w": torch.ones(1000)}, {"progress": {}})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.strerror(caught.value.__cause__.errno) in str(caught.value)
    assert names(tmp_path) == ["step-00000001"]
    check(folder.latest(), 1)


def test_two_processes_do_not_write_at_once(tmp_path: Path) -> None:
    """A second writer would remove the unfinished files of the first."""
    folder = write(tmp_path, 1)
    with folder._locked(), pytest.raises(CheckpointNotWritten):
        write(tmp_path, 2)
    check(write(tmp_path, 2).latest(), 2)
