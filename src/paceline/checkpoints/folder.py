"""Write, find and remove the checkpoints of one run, with one folder per saved step.

    checkpoints/
        step-00000500/
            manifest.json          sizes and checksums of all files, and the manifest's checksum
            model.safetensors      tensors, readable with `load_file` of safetensors
            progress.json          plain values
        .partial-3f9a01c2/         being written or removed; never read
        step-00000500.old/         exists only while this step's checkpoint is being replaced

A checkpoint gets its final name after all of its files are written. If the writer is killed,
earlier checkpoints stay intact, readers ignore the incomplete checkpoint, and the next writer
removes the incomplete checkpoint.
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
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from paceline.checkpoints import json_values, manifest, tensor_file
from paceline.checkpoints.json_values import Json
from paceline.checkpoints.manifest import MANIFEST, Damaged, FileEntry, Manifest
from paceline.checkpoints.tensor_file import Tensors
from paceline.core.errors import CheckpointNotWritten, InvalidInput
from paceline.links.failpoints import reach
from paceline.links.files import limits, read_file

logger = logging.getLogger(__name__)

_TENSORS, _JSON = ".safetensors", ".json"
_NAME = re.compile(r"step-(\d{8,})(\.old)?")
_OLD, _PARTIAL = ".old", ".partial-"


class _Found(NamedTuple):
    """A checkpoint folder; `is_newer`: true for step-N, false for step-N.old, now replaced."""

    step: int
    is_newer: bool
    path: Path


@dataclass(frozen=True)
class Loaded:
    """A checkpoint whose checksums were verified.

    `names`: names of its files. `written_s`: time of writing, in seconds since the Unix epoch.
    `skipped`: path and fault of each newer checkpoint that was skipped as damaged.
    """

    path: Path
    step: int
    names: tuple[str, ...]
    written_s: float
    skipped: tuple[str, ...] = ()

    def read(self) -> tuple[Tensors, dict[str, Json]]:
        """Return the tensors by "FILE/NAME", in host memory, and the plain values by "FILE".

        Raises InvalidInput for an unreadable file.
        """
        tensors, parts = dict[str, Tensor](), dict[str, Json]()
        for path in (self.path / name for name in self.names):
            try:
                if path.suffix == _JSON:
                    parts[path.stem] = json_values.loads(read_file(path, limits.CHECKPOINT_VALUES))
                else:
                    # Copy, because load_file returns views of the file, which may be replaced
                    # later.
                    for key, tensor in load_file(path).items():
                        tensors[f"{path.stem}/{key}"] = tensor.clone()
            except (OSError, SafetensorError, KeyError, ValueError, OverflowError) as error:
                raise InvalidInput(str(path), f"is not readable: {error}") from None
        return tensors, parts


class CheckpointFolder:
    """Keeps the newest `keep` checkpoints of one run; only one process at a time may write."""

    def __init__(self, path: Path, keep: int = 2) -> None:
        self.path, self._keep = path, keep

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps of all checkpoints in ascending order, including damaged checkpoints."""
        return tuple(sorted({one.step for one in self._found()}))

    def write(self, step: int, tensors: Mapping[str, Tensor], parts: Mapping[str, Json]) -> Path:
        """Write the checkpoint of a step and return its folder.

        `tensors`: tensors in host memory; `FILE/NAME` is stored as NAME in FILE.safetensors.
        `parts`: plain values; FILE is stored in FILE.json. Afterwards, the folder contains only
        this checkpoint and the `keep` - 1 ones before it. Checkpoints of later steps are removed,
        because the run has resumed from an earlier step. Raises CheckpointNotWritten if writing
        fails, for example on a full disk; earlier checkpoints then stay intact. Raises InvalidInput
        for an unsupported value.
        """
        files: dict[str, Any] = {  # encode before writing, as unsupported values raise InvalidInput
            f"{name}{_JSON}": json_values.dumps(name, one) for name, one in parts.items()
        }
        for name, tensor in tensors.items():
            file, _, rest = name.partition("/")
            files.setdefault(f"{file}{_TENSORS}", {})[rest] = tensor
        for name in files:
            manifest.check_file_name(name)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with self._locked():
                self._clean_up()
                path = self._write(step, files)
                self._remove_others(step)
            reach("checkpoint.written", step=step)
        except OSError as error:
            problem = f"cannot write the checkpoint of step {step}: {error.strerror or error}"
            rest = "there is no earlier checkpoint"
            with suppress(InvalidInput, IndexError):
                rest = f"the checkpoint of step {self.steps[-1]} remains"
            raise CheckpointNotWritten(f"{self.path}: {problem}; {rest}") from error
        return path

    def latest(self) -> Loaded | None:
        """Return the newest complete checkpoint; None if the folder has no checkpoints.

        Raises InvalidInput if a checkpoint has a newer format, or if the folder has only damaged
        checkpoints or unrelated files.
        """
        skipped: list[str] = []
        known = self._found()
        if not known and (others := [one.name for one in self._paths() if one.name[0] != "."]):
            problem = f"has no checkpoint folder such as {_name(500)}, but contains {others[0]!r}"
            raise InvalidInput(str(self.path), problem)
        for _, _, path in reversed(known):
            try:
                found = manifest.read(path)
                if path.name not in (_name(found.step), _name(found.step) + _OLD):
                    raise Damaged(
                        f"{MANIFEST} names step {found.step}, but the folder names another step"
                    )
                manifest.check_files(path, found)
            except Damaged as error:
                skipped.append(f"{path}: {error}")
                continue
            written_s = (path / MANIFEST).stat().st_mtime
            return Loaded(path, found.step, tuple(found.files), written_s, tuple(skipped))
        if skipped:
            problem = f"has only damaged checkpoints: {'; '.join(skipped)}"
            raise InvalidInput(str(self.path), problem)
        return None

    def _found(self) -> list[_Found]:
        """Return all checkpoints, including damaged and `.old` ones, newest last."""
        named = [(path, _NAME.fullmatch(path.name)) for path in self._paths()]
        return sorted(_Found(int(one[1]), not one[2], path) for path, one in named if one)

    def _paths(self) -> list[Path]:
        try:
            return sorted(self.path.iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise InvalidInput(str(self.path), f"is not readable: {error.strerror}") from None

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the folder, because a second writer would remove this writer's unfinished files.

        Raises OSError if another process holds the lock.
        """
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise OSError(errno.EBUSY, "another process is writing to the folder") from None
            except OSError:
                logger.debug("%s cannot be locked, as on some network file systems", self.path)
            yield
        finally:
            # Closing does not unlock if a forked process has a copy of the descriptor.
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def _write(self, step: int, files: Mapping[str, Tensors | bytes]) -> Path:
        """Write and fsync a checkpoint, then rename it to the name of its step."""
        partial, path = self._temporary(), self.path / _name(step)
        partial.mkdir()
        try:
            entries = {name: _write_file(partial / name, one) for name, one in files.items()}
            whole = Manifest(step, entries, manifest.FORMAT)
            _write_file(partial / MANIFEST, manifest.to_bytes(whole))
            _sync(partial)
            if path.exists():  # keep the old checkpoint readable until the new one is complete
                path.rename(path.with_name(path.name + _OLD))
                reach("checkpoint.replacing", step=step)
            partial.rename(path)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        _sync(self.path)  # so that the rename survives a power failure
        reach("checkpoint.named", step=step)
        return path

    def _remove_others(self, step: int) -> None:
        """Remove checkpoints that are later than `step` or `.old`; keep the newest `keep`."""
        found = self._found()
        kept = [one for one in found if one.is_newer and one.step <= step][-self._keep :]
        for one in found:
            if one not in kept:
                try:
                    self._remove(one.path)
                except OSError as error:  # only warn, because the new checkpoint is complete
                    logger.warning("%s: cannot remove it: %s", one.path, error.strerror)

    def _clean_up(self) -> None:
        """Remove what killed writers left; rename step-N.old to step-N if that is missing."""
        for partial in self.path.glob(f"{_PARTIAL}*"):
            _delete(partial)
        for one in self._found():
            if one.is_newer:
                continue
            path = self.path / _name(one.step)
            if path.exists():
                self._remove(one.path)
            else:
                one.path.rename(path)

    def _remove(self, path: Path) -> None:
        """Remove a checkpoint; rename it first, so that readers never see half of its files."""
        partial = self._temporary()
        path.rename(partial)
        reach("checkpoint.removing")
        _delete(partial)

    def _temporary(self) -> Path:
        return self.path / f"{_PARTIAL}{secrets.token_hex(4)}"


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _write_file(path: Path, contents: Tensors | bytes) -> FileEntry:
    """Write and fsync a file; return the file's size and checksum."""
    pieces = [contents] if isinstance(contents, bytes) else tensor_file.encoded(contents)
    with path.open("xb") as file:
        entry = manifest.write_pieces(file, pieces)
        file.flush()
        os.fsync(file.fileno())
    reach("checkpoint.file", file=path.name)
    return entry


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
