"""The checkpoints of one run: a folder for each, written aside and renamed.

    checkpoints/
        step-00000500/
            manifest.json          the files' sizes and checksums, and its own
            model.safetensors      tensors: `load_file` of safetensors reads them
            progress.json          values
        step-00001000/
        .partial-3f9a01c2/         being written, or being removed; never read
        step-00000500.old/         only while another checkpoint of that step takes its place

A writer that is killed at any moment leaves the checkpoints before as they were, or these and a new
one that is whole. What else it leaves is removed by the next one. Files have the rights of the
user's umask, as all results of a run have: who may read those may go on with the run.
"""

import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from paceline.checkpoints import json_values, manifest, tensor_file
from paceline.checkpoints.json_values import Json
from paceline.checkpoints.manifest import MANIFEST, Damaged, FileEntry, Manifest, SummedFile
from paceline.checkpoints.tensor_file import Tensors
from paceline.core.errors import CheckpointNotWritten, InvalidInput
from paceline.links.failpoints import reach
from paceline.links.files import limits
from paceline.links.files.reading import read_file

logger = logging.getLogger(__name__)

Contents = Mapping[str, Tensor] | Json  # of NAME.safetensors, and of NAME.json
_TENSORS, _JSON = ".safetensors", ".json"
_NAME = re.compile(r"step-(\d{8,})(\.old)?")
_OLD, _PARTIAL = ".old", ".partial-"


class _Found(NamedTuple):
    """A checkpoint by its name; of two of one step, the one that is not `.old` is newer."""

    step: int
    is_newer: bool
    path: Path


@dataclass(frozen=True)
class Loaded:
    """A checkpoint, each byte of which was checked.

    `names` are its files. `skipped` has a line for each newer one that is damaged: which file, and
    what is wrong. `written_s` is when it was written, in seconds since the epoch.
    """

    path: Path
    step: int
    names: tuple[str, ...]
    written_s: float
    skipped: tuple[str, ...] = ()

    def tensors(self, name: str) -> Tensors:
        """Return the tensors of NAME.safetensors, in the host's memory.

        None at all if there is no such file: the state of SGD without momentum has none to write.
        """
        path = self.path / (name + _TENSORS)
        if path.name not in self.names:
            return {}
        try:
            # Copies: the library's are views of the file, which may be removed or replaced.
            return {key: one.clone() for key, one in load_file(path).items()}
        except (OSError, SafetensorError, KeyError, OverflowError) as error:  # KeyError: a type
            raise InvalidInput(str(path), f"cannot be read: {error}") from None

    def json(self, name: str) -> Json:
        """Return the value of NAME.json; InvalidInput if there is no such file."""
        path = self.path / (name + _JSON)
        if path.name not in self.names:
            raise InvalidInput(str(self.path), f"the checkpoint has no {path.name}")
        try:
            return json_values.loads(read_file(path, limits.CHECKPOINT_VALUES))
        except ValueError as error:
            raise InvalidInput(str(path), f"cannot be read: {error}") from None


class CheckpointFolder:
    """The checkpoints of one run, of which the newest `keep` stay.

    One process writes. Making the object touches nothing. InvalidInput if `keep` is below 1.
    """

    def __init__(self, path: Path, keep: int = 2) -> None:
        if keep < 1:
            raise InvalidInput("keep", f"{keep} checkpoints", hint="at least 1 is kept")
        self.path, self._keep = path, keep
        self._damaged: set[Path] = set()  # as `latest` has found

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps of the checkpoints that are there, in order, whole or not.

        Raises InvalidInput if the folder cannot be read.
        """
        return tuple(sorted({one.step for one in self._found()}))

    def write(self, step: int, files: Mapping[str, Contents]) -> Path:
        """Write the checkpoint of a step, and return its folder.

        `files` are the tensors of each NAME.safetensors, in the host's memory, and the value of
        each NAME.json. Then all but the newest `keep` are removed, and those of later steps: a run
        that went on from an earlier one has given them up. Raises CheckpointNotWritten with the
        reason if there is no space, or the folder cannot be written to: those before stay, and
        nothing of this one. InvalidInput for what a file cannot hold.
        """
        texts = {  # before anything is written
            name: json_values.dumps(name, contents)
            for name, contents in files.items()
            if name.endswith(_JSON)
        }
        for name in files:
            manifest.check_file_name(name)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with self._locked():
                self._clean_up()
                partial = self._write_partial(step, {**files, **texts})
                path = self._put_in_place(partial, step)
                self._remove_others(step)
            reach("checkpoint.written", step=step)
        except OSError as error:
            raise CheckpointNotWritten(
                f"{self.path}: the checkpoint of step {step} cannot be written: "
                f"{error.strerror or error}; {self._what_is_kept()}"
            ) from error
        return path

    def latest(self) -> Loaded | None:
        """Return the newest checkpoint that is whole; None if there is none at all.

        Raises InvalidInput if all are damaged, naming each; if one is of a newer format; and for a
        folder that has other things only.
        """
        skipped: list[str] = []
        for _, _, path in reversed(self._found(strict=True)):
            try:
                found = manifest.read(path)
                if path.name not in (_name(found.step), _name(found.step) + _OLD):
                    raise Damaged(f"{MANIFEST} is that of step {found.step}")
                manifest.check_files(path, found)
            except Damaged as error:
                skipped.append(f"{path}: {error}")
                self._damaged.add(path)
                continue
            written_s = (path / MANIFEST).stat().st_mtime
            return Loaded(path, found.step, tuple(found.files), written_s, tuple(skipped))
        if skipped:
            raise InvalidInput(str(self.path), f"every checkpoint is damaged: {'; '.join(skipped)}")
        return None

    def _found(self, *, strict: bool = False) -> list[_Found]:
        """Return the checkpoints, newest last. Strict: InvalidInput if others' files are there."""
        try:
            paths = sorted(self.path.iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise InvalidInput(
                str(self.path), f"not a folder of checkpoints: {error.strerror}"
            ) from None
        named = [(path, _NAME.fullmatch(path.name)) for path in paths]
        found = [_Found(int(match[1]), not match[2], path) for path, match in named if match]
        others = [path.name for path in paths if not path.name.startswith(".")]
        if strict and others and not found:
            raise InvalidInput(
                str(self.path),
                f"not a folder of checkpoints, which are named as {_name(500)}: it has "
                f"{others[0]!r}",
            )
        return sorted(found)

    def _what_is_kept(self) -> str:
        with suppress(InvalidInput):
            if steps := self.steps:
                return f"that of step {steps[-1]} is kept"
        return "there is none before it"

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other writers away: what they write now would be taken for a killed one's."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise OSError(errno.EBUSY, "another process is writing there now") from None
            except OSError:
                logger.debug("%s cannot be locked, as on some network file systems", self.path)
            yield
        finally:
            # Before closing: a process forked meanwhile has the descriptor, too.
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def _write_partial(self, step: int, files: Mapping[str, Contents | bytes]) -> Path:
        """Write a checkpoint aside, and have it on the disk; on any error nothing of it is left."""
        partial = self._aside()
        partial.mkdir()
        try:
            entries = {name: _write_file(partial / name, one) for name, one in files.items()}
            _write_file(partial / MANIFEST, manifest.to_bytes(Manifest(step, entries)))
            _sync(partial)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        return partial

    def _put_in_place(self, partial: Path, step: int) -> Path:
        """Give what was written aside its name; at each moment it or the one before has one."""
        path = self.path / _name(step)
        try:
            if path in self._damaged:
                self._remove(path)
            elif path.exists():
                path.rename(path.with_name(path.name + _OLD))
                reach("checkpoint.replacing", step=step)
            partial.rename(path)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        _sync(self.path)  # a rename is on the disk once its folder is
        reach("checkpoint.named", step=step)
        return path

    def _remove_others(self, step: int) -> None:
        """Remove the checkpoints that are not kept, now that the one of this step is there."""
        found = self._found()
        whole = [one for one in found if one.is_newer and one.path not in self._damaged]
        kept = [one for one in whole if one.step <= step][-self._keep :]
        for one in found:
            if one not in kept:
                try:
                    self._remove(one.path)
                except OSError as error:  # the new one is written nevertheless
                    logger.warning(
                        "%s: an old checkpoint cannot be removed: %s", one.path, error.strerror
                    )

    def _clean_up(self) -> None:
        """Remove what killed writers have left, but for a checkpoint that lost its name."""
        for partial in self.path.glob(f"{_PARTIAL}*"):
            _delete(partial)
        for one in self._found():
            if one.is_newer:
                continue
            path = self.path / _name(one.step)
            if path in self._damaged:
                self._remove(path)
            if path.exists() or one.path in self._damaged:
                self._remove(one.path)
            else:
                one.path.rename(path)

    def _remove(self, path: Path) -> None:
        """Remove a checkpoint, which is never seen half removed."""
        aside = self._aside()
        path.rename(aside)
        reach("checkpoint.removing")
        self._damaged.discard(path)
        _delete(aside)

    def _aside(self) -> Path:
        return self.path / f"{_PARTIAL}{secrets.token_hex(4)}"


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _write_file(path: Path, contents: Contents | bytes) -> FileEntry:
    """Write a file and have it on the disk; return its size and checksum."""
    with path.open("xb") as file:
        summed = SummedFile(file)
        if isinstance(contents, bytes):
            summed.write(contents)
        else:
            tensor_file.write(contents, summed.write)
        file.flush()
        os.fsync(file.fileno())
    reach("checkpoint.file", file=path.name)
    return summed.entry


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
