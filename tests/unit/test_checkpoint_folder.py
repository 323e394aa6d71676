"""Folders of checkpoints: whatever is broken, killed or full, what is read is what was written."""

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from paceline.checkpoints import json_values, manifest, tensor_file
from paceline.checkpoints.folder import CheckpointFolder, Loaded
from paceline.checkpoints.manifest import FileEntry, Manifest
from paceline.core.errors import CheckpointNotWritten, InvalidInput

PROGRAMS = Path(__file__).parent / "programs"
FILES = ["manifest.json", "model.safetensors", "progress.json", "rank1.safetensors"]


def values_of(step: int) -> Tensor:
    return torch.arange(300, dtype=torch.float32) * step


def files_of(step: int) -> dict:
    return {
        "model.safetensors": {"weight": values_of(step), "count": torch.tensor(step)},
        "rank1.safetensors": {"error": -values_of(step)},
        "progress.json": {"epoch": step, "loss": math.inf, "betas": (0.9, 0.99)},
    }


def check(loaded: Loaded, step: int) -> None:
    """Assert that a checkpoint has the values of its step, and no others."""
    assert loaded.step == step
    assert sorted([*loaded.names, "manifest.json"]) == FILES
    model = loaded.tensors("model")
    assert model.keys() == {"weight", "count"}
    assert torch.equal(model["weight"], values_of(step))
    assert model["count"] == step
    assert torch.equal(loaded.tensors("rank1")["error"], -values_of(step))
    assert loaded.json("progress") == files_of(step)["progress.json"]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("written") / "checkpoints"
    folder = CheckpointFolder(path)
    for step in (1, 2):
        folder.write(step, files_of(step))
    return path


@contextmanager
def copy_of(written: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as place:
        yield Path(shutil.copytree(written, Path(place) / "checkpoints"))


def test_the_newest_is_read_back(tmp_path: Path):
    folder = CheckpointFolder(tmp_path / "runs" / "1" / "checkpoints")
    assert folder.latest() is None
    for step in (500, 1000, 100_000_000):
        assert folder.write(step, files_of(step)) == folder.path / f"step-{step:08d}"
        check(folder.latest(), step)
    assert folder.latest().skipped == ()
    assert folder.steps == (1000, 100_000_000)


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_few_are_kept(tmp_path: Path, keep: int):
    folder = CheckpointFolder(tmp_path, keep)
    for step in (2, 9, 10, 11):
        folder.write(step, files_of(step))
    assert names(tmp_path) == [f"step-{one:08d}" for one in (2, 9, 10, 11)[-keep:]]


def test_a_run_that_goes_on_from_an_earlier_one_gives_up_the_later_ones(tmp_path: Path):
    """Those of later steps would be taken for newer ones."""
    folder = CheckpointFolder(tmp_path, keep=3)
    for step in (4, 5, 6):
        folder.write(step, files_of(step))
    folder.write(5, files_of(5))
    assert folder.steps == (4, 5)


def test_a_damaged_one_does_not_take_the_place_of_one_that_is_kept(tmp_path: Path):
    folder = CheckpointFolder(tmp_path, keep=2)
    for step in (4, 6):
        folder.write(step, files_of(step))
    (tmp_path / "step-00000006" / "progress.json").unlink()
    check(folder.latest(), 4)
    folder.write(8, files_of(8))
    assert folder.steps == (4, 8)


def test_the_same_step_can_be_written_again(tmp_path: Path):
    folder = CheckpointFolder(tmp_path, keep=1)
    folder.write(7, files_of(1))
    folder.write(7, files_of(7))
    check(folder.latest(), 7)
    assert names(tmp_path) == ["step-00000007"]


def test_a_damaged_one_of_the_same_step_is_replaced(tmp_path: Path):
    folder = CheckpointFolder(tmp_path)
    for step in (6, 7):
        folder.write(step, files_of(step))
    (tmp_path / "step-00000007" / "manifest.json").write_text("")
    check(folder.latest(), 6)
    folder.write(7, files_of(7))
    check(folder.latest(), 7)
    assert folder.steps == (6, 7)


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_kill_while_one_is_replaced_leaves_it(tmp_path: Path, is_replaced: bool):
    """Before and after the new one has got the name."""
    folder = CheckpointFolder(tmp_path, keep=1)
    folder.write(7, files_of(7))
    old = (tmp_path / "step-00000007").rename(tmp_path / "step-00000007.old")
    if is_replaced:
        shutil.copytree(old, tmp_path / "step-00000007")
    again = CheckpointFolder(tmp_path, keep=2)
    check(again.latest(), 7)
    again.write(8, files_of(8))
    assert names(tmp_path) == ["step-00000007", "step-00000008"]


def test_what_killed_writers_have_left_is_removed_and_never_read(tmp_path: Path):
    folder = CheckpointFolder(tmp_path)
    folder.write(1, files_of(1))
    shutil.copytree(tmp_path / "step-00000001", tmp_path / ".partial-3f9a01c2")
    (tmp_path / ".partial-file").touch()
    (tmp_path / "step-00000001").rename(tmp_path / ".partial-x")
    assert folder.latest() is None
    folder.write(2, files_of(2))
    assert names(tmp_path) == ["step-00000002"]


# Damage


@given(st.data())
@settings(max_examples=200)
def test_a_changed_bit_is_found(written: Path, data):
    with copy_of(written) as path:
        name = data.draw(st.sampled_from(FILES))
        file = path / "step-00000002" / name
        content = bytearray(file.read_bytes())
        place = data.draw(st.integers(0, 8 * len(content) - 1))
        content[place // 8] ^= 1 << place % 8
        file.write_bytes(content)
        loaded = CheckpointFolder(path).latest()
        check(loaded, 1)
        assert len(loaded.skipped) == 1
        assert f"step-00000002: {name} " in loaded.skipped[0]


@given(st.data())
@settings(max_examples=200)
def test_a_cut_is_found(written: Path, data):
    with copy_of(written) as path:
        name = data.draw(st.sampled_from(FILES))
        file = path / "step-00000002" / name
        length = data.draw(st.integers(0, file.stat().st_size - 1))
        os.truncate(file, length)
        loaded = CheckpointFolder(path).latest()
        check(loaded, 1)
        assert f"step-00000002: {name} " in loaded.skipped[0]


def remove(file: Path) -> None:
    file.unlink()


def lengthen(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\n")


def swap(file: Path) -> None:
    other = file.parent.parent / "step-00000001" / file.name
    content = file.read_bytes()
    file.write_bytes(other.read_bytes())
    other.write_bytes(content)


def replace_by_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def replace_by_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize("damage", [remove, lengthen, replace_by_folder, replace_by_pipe])
@pytest.mark.parametrize("name", FILES)
def test_other_damage_is_found(written: Path, name: str, damage: Callable[[Path], None]):
    with copy_of(written) as path:
        damage(path / "step-00000002" / name)
        loaded = CheckpointFolder(path).latest()
        check(loaded, 1)
        assert f"step-00000002: {name} " in loaded.skipped[0]
        assert "\n" not in loaded.skipped[0]


@pytest.mark.parametrize("name", FILES)
def test_files_of_two_checkpoints_that_were_swapped_are_found(written: Path, name: str):
    with copy_of(written) as path:
        swap(path / "step-00000002" / name)
        with pytest.raises(InvalidInput, match="every checkpoint is damaged") as error:
            CheckpointFolder(path).latest()
        for step in (1, 2):
            assert f"step-{step:08d}: {name} " in str(error.value)
        assert "\n" not in str(error.value)


def test_folders_that_were_swapped_are_found(written: Path):
    with copy_of(written) as path:
        shutil.rmtree(path / "step-00000001")
        (path / "step-00000002").rename(path / "step-00000003")
        with pytest.raises(InvalidInput, match=r"step-00000003: manifest.json is that of step 2"):
            CheckpointFolder(path).latest()


# What is no checkpoint, or another's


def forge(folder: Path, own: Manifest) -> None:
    (folder / "manifest.json").write_bytes(manifest.to_bytes(own))


def test_a_newer_format_is_refused_with_what_to_do(written: Path):
    with copy_of(written) as path:
        forge(path / "step-00000002", Manifest(2, {}, format_version=2))
        with pytest.raises(
            InvalidInput, match=r"of format 2, and this version of Paceline reads 1; go on with"
        ):
            CheckpointFolder(path).latest()


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "..", "a/b.json", ".json", "manifest.json", "x"]
)
def test_no_other_file_is_read(written: Path, name: str):
    with copy_of(written) as path:
        forge(path / "step-00000002", Manifest(2, {name: FileEntry(0, "00000000")}))
        loaded = CheckpointFolder(path).latest()
        check(loaded, 1)
        assert f"{name!r} is no file of a checkpoint" in loaded.skipped[0]
        with pytest.raises(InvalidInput, match="a file of a checkpoint is named by"):
            CheckpointFolder(path).write(3, {name: {}})
        assert names(path) == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda one: one.pop("step"), "step: Field required"),
        (lambda one: one.update(step="many"), "step: Input should be a valid integer"),
        (lambda one: one.update(owner=1), "owner: Unexpected keyword argument"),
        (lambda one: one.update(format_version=0), "there is no format 0"),
        (lambda one: one.update(files=[]), "files: Input should be"),
    ],
)
def test_a_manifest_with_other_fields_is_none(written: Path, change, message: str):
    with copy_of(written) as path:
        file = path / "step-00000002" / "manifest.json"
        fields = json.loads(file.read_text())
        del fields["crc32"]
        change(fields)
        head = json.dumps(fields, indent=1).removesuffix("\n}").encode() + b",\n"
        file.write_bytes(head + manifest._last_line(head))
        assert message in CheckpointFolder(path).latest().skipped[0]


def test_a_folder_of_other_things_is_refused(tmp_path: Path, written: Path):
    (tmp_path / ".hidden").touch()
    assert CheckpointFolder(tmp_path).latest() is None
    (tmp_path / "holiday.jpg").touch()
    with pytest.raises(InvalidInput, match=r"not a folder of checkpoints, .* has 'holiday.jpg'"):
        CheckpointFolder(tmp_path).latest()
    with pytest.raises(InvalidInput, match="not a folder of checkpoints: Not a directory"):
        CheckpointFolder(tmp_path / "holiday.jpg").latest()
    with pytest.raises(InvalidInput, match=r"not a folder of checkpoints, .* 'manifest.json'"):
        CheckpointFolder(written / "step-00000001").latest()


def test_none_is_too_few(tmp_path: Path):
    with pytest.raises(InvalidInput, match="keep: 0 checkpoints; at least 1"):
        CheckpointFolder(tmp_path, keep=0)


def test_parts_that_are_not_there_are_named_and_have_no_tensors(written: Path):
    loaded = CheckpointFolder(written).latest()
    with pytest.raises(InvalidInput, match=r"step-00000002: the checkpoint has no tuner.json"):
        loaded.json("tuner")
    assert loaded.tensors("tuner") == {}


# Writing that fails


def test_what_cannot_be_saved_is_refused_and_leaves_nothing(tmp_path: Path):
    folder = CheckpointFolder(tmp_path)
    folder.write(1, files_of(1))
    for contents, message in (
        ({"a.safetensors": {"w": torch.ones(2, dtype=torch.complex64)}}, "'w' is torch.complex64"),
        ({"a.safetensors": {"w": torch.eye(2).to_sparse()}}, "'w' is torch.sparse_coo"),
        ({"a.safetensors": {"w": 3}}, "'w' is int, and cannot be saved"),
        ({"a.json": {"hook": [print]}}, r"a.json.hook\[0\] is builtins.builtin_function_or"),
    ):
        with pytest.raises(InvalidInput, match=message):
            folder.write(2, contents)
    assert names(tmp_path) == ["step-00000001"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path):
    (tmp_path / "file").touch()
    folder = CheckpointFolder(tmp_path / "file" / "checkpoints")
    with pytest.raises(
        CheckpointNotWritten,
        match=r"file/checkpoints: the checkpoint of step 3 cannot be written: Not a directory",
    ):
        folder.write(3, files_of(3))


def full_disk(program: list[str]) -> None:
    done = subprocess.run(program, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["refused", "warned", "written"]


def test_a_file_that_may_not_grow_leaves_the_one_before(tmp_path: Path):
    program = str(PROGRAMS / "full_disk.py")
    full_disk([sys.executable, program, str(tmp_path / "a"), "limit", "File too large"])


def test_a_full_disk_leaves_the_one_before(tmp_path: Path):
    """On a small file system that only this process sees."""
    mounted = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=1m none "$0" && "$@"']
    place = str(tmp_path)
    if (
        shutil.which("unshare") is None
        or subprocess.run([*mounted, place, "true"], capture_output=True).returncode
    ):
        pytest.skip("this user may not mount a file system")
    program = str(PROGRAMS / "full_disk.py")
    full_disk([*mounted, place, sys.executable, program, place, "", "No space left on device"])


def test_a_writer_that_is_killed_at_any_moment_leaves_a_whole_one(start):
    done = start(str(PROGRAMS / "killed_writers.py")).finish()
    assert done.code == 0, done.err
    assert len(done.out.split()) == 50


def test_two_processes_do_not_write_at_once(tmp_path: Path):
    """What the other one is writing would be taken for what a killed one has left."""
    folder = CheckpointFolder(tmp_path)
    folder.write(1, files_of(1))
    with (
        folder._locked(),
        pytest.raises(CheckpointNotWritten, match="another process is writing there now"),
    ):
        CheckpointFolder(tmp_path).write(2, files_of(2))
    CheckpointFolder(tmp_path).write(2, files_of(2))


# The files


@given(st.data())
@settings(max_examples=100)
def test_the_library_reads_tensors_of_all_types_and_layouts(data):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    tensors = {}
    for index in range(data.draw(st.integers(0, 5))):
        dtype = data.draw(st.sampled_from(list(tensor_file._NAMES)))
        shape = data.draw(st.lists(st.integers(0, 5), max_size=4))
        bits = torch.randint(0, 256, (*shape, dtype.itemsize), generator=generator)
        if dtype == torch.bool:
            bits %= 2
        tensor = bits.to(torch.uint8).view(dtype).reshape(shape)
        # Rows and columns in another order in memory.
        tensors[f"{data.draw(st.text())}/{index}"] = tensor.mT if tensor.dim() > 1 else tensor
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "file"
        with path.open("wb") as file:
            tensor_file.write(tensors, file.write)
        found = load_file(path)
        with safe_open(path, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        mine, other = (
            one.contiguous().reshape(-1).view(torch.uint8) for one in (tensor, found[name])
        )
        assert torch.equal(mine, other)


def test_a_tensor_of_many_pieces_is_whole(tmp_path: Path):
    large = torch.arange(3 * 2**20 // 8 + 5)
    with (tmp_path / "file").open("wb") as file:
        tensor_file.write({"large": large}, file.write)
    assert torch.equal(load_file(tmp_path / "file")["large"], large)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text(), inner)
        | st.dictionaries(st.integers() | st.just("$"), inner)
        | st.dictionaries(st.integers(), st.integers()).map(Counter)
    ),
    max_leaves=20,
)


@given(plain)
def test_plain_values_come_back_with_their_types(value):
    text = json_values.dumps("value", value)
    # repr tells 1 from 1.0 and True, 0.0 from -0.0, and takes a NaN for itself.
    assert repr(json_values.loads(text)) == repr(value)
    json.loads(text, parse_constant=pytest.fail)  # any other program reads it, too


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [1, {2}]}, r"it\.a\[1\] is builtins.set"),
        ({"lr": torch.tensor(1.0)}, r"it\.lr is torch.Tensor, which cannot be saved as JSON"),
        ({(1, print): 1}, r"key \(1, <built-in function print>\)\[1\] is builtins"),
        (torch.float32, "it is torch.dtype"),
    ],
)
def test_what_json_cannot_hold_is_named(value, message: str):
    with pytest.raises(InvalidInput, match=message):
        json_values.dumps("it", value)


@pytest.mark.parametrize(
    "text", [b"", b"{", b"NaN", b'{"$": "set"}', b'{"$": "tuple"}', b'{"$": ["x"]}', b"[" * 10**5]
)
def test_other_json_is_refused(text: bytes):
    with pytest.raises(ValueError, match=r"."):
        json_values.loads(text)
