"""Snapshots of a parameter server: a hub that was killed goes on from the last one.

    manifest.json                    names the file of tensors; replaced at once, by renaming
    snapshot-VERSION-*.safetensors
    .partial/                        what is being written; the next save removes what a kill left

A save that is interrupted at any moment leaves the manifest, and the file that it names, as they
were. Half-done steps are not kept: their workers begin them again.
"""

import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.core.errors import InvalidInput
from paceline.strategies.wheel import kept
from paceline.strategies.wheel.manifest import NAME, Manifest, read, text_of
from paceline.strategies.wheel.server import ParameterServer

_PREFIX = "snapshot-"
_PARTIAL = ".partial"
_MOST_SAID = 3


def save(folder: Path, server: ParameterServer, *, run_id: str, layout: str) -> Manifest:
    """Write a snapshot of the server, and remove the one before.

    Parameters, buffers, the optimizer's state, the random number generators of this process, and
    how far each worker is. InvalidInput if it cannot be written; then the one before is still
    there.
    """
    scalars, tensors = kept.optimizer_parts(server.optimizer, server.model)
    tensors |= kept.model_tensors(server.model)
    tensors |= kept.random_tensors(_device_of(server))
    name = f"{_PREFIX}{server.version}-{secrets.token_hex(4)}.safetensors"
    done = server.statistics
    written = Manifest(
        run_id,
        layout,
        server.version,
        server.workers.progress(),
        dict(done.staleness),
        name,
        scalars,
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / name, lambda path: save_file(_stored(tensors), path))
        _write(folder / NAME, lambda path: path.write_text(text_of(written)))
    except (OSError, SafetensorError) as error:
        raise InvalidInput(
            f"{folder}: the snapshot cannot be written, and the one before is kept: {error}"
        ) from error
    _remove_others(folder, name)
    return written


def load(
    folder: Path, server: ParameterServer, *, layout: str, run_id: str | None = None
) -> Manifest:
    """Let a new server go on where the snapshot in `folder` was taken, and return its manifest.

    What the snapshot has replaces the server's: learning rates, too. InvalidInput if there is no
    snapshot, or it is one of another run, layout, model, optimizer or number of workers, and says
    the difference; nothing is changed then.
    """
    found = read(folder)
    if found is None:
        raise InvalidInput(f"{folder}: there is no snapshot, as it has no {NAME}")
    known = {"run": run_id, "layout": layout, "number of workers": len(server.workers.all)}
    there = {"run": found.run_id, "layout": found.layout, "number of workers": len(found.workers)}
    for what, wanted in known.items():
        if wanted not in (None, there[what]):
            raise InvalidInput(f"{folder}: the snapshot's {what} is {there[what]}, not {wanted}")
    tensors = _read_tensors(folder / found.tensors)
    try:
        own = kept.model_tensors(server.model)
        _check_fits(own, tensors)
        state = kept.optimizer_state(found.optimizer, tensors, server.optimizer, server.model)
    except InvalidInput as error:
        raise InvalidInput(f"{folder}: the snapshot does not fit: {error}") from None
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
    server.optimizer.load_state_dict(state)
    kept.set_random(tensors, _device_of(server))
    server.restore(found.version, found.workers, found.staleness)
    return found


def _device_of(server: ParameterServer) -> torch.device:
    return server.halves.head_parameters[0].device


def _stored(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors as they can be written: in memory, in a row, and each its own."""
    return {
        name: tensor.cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }


def _write(path: Path, write: Callable[[Path], object]) -> None:
    """Have a file be there whole and on the disk, or not at all."""
    # A folder of its own, as the libraries that write have temporary files, too.
    folder = path.parent / _PARTIAL
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        write(folder / path.name)
        _to_disk(folder / path.name)
        (folder / path.name).replace(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    _to_disk(path.parent)


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_others(folder: Path, name: str) -> None:
    """Remove earlier snapshots, and those of which an interrupted save wrote no manifest."""
    for path in folder.glob(f"{_PREFIX}*.safetensors"):
        if path.name != name:
            path.unlink(missing_ok=True)


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise InvalidInput(f"{path}: the snapshot cannot be read: {error}") from error


def _check_fits(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    there = {name: tensor for name, tensor in tensors.items() if name.startswith("model/")}
    found = kept.differences(own, there)
    if found:
        more = f", and {len(found) - _MOST_SAID} more" if len(found) > _MOST_SAID else ""
        raise InvalidInput("; ".join(found[:_MOST_SAID]) + more)
    if "random/cpu" not in tensors:
        raise InvalidInput("it has no state of the random numbers")
