"""Checkpoints of a parameter server: a hub that was killed goes on from the last one.

    manifest.json                    names the file of tensors; replaced at once, by renaming
    snapshot-VERSION-*.safetensors   tensors, by these names:
        model/NAME                   parameters and buffers
        state/NAME/KEY               the optimizer's tensors of a parameter
        group/INDEX/KEY              tensors of a parameter group, such as a learning rate
        random/cpu, /cuda            the states of the random number generators
    epochs.json                      the epochs that are over, with their losses and scores
    .partial/                        what is being written; the next save removes what a kill left

A save that is interrupted at any moment leaves the manifest, and the file that it names, as they
were. Half-done steps are not saved: their workers begin them again.
"""

import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.core.errors import InvalidInput
from paceline.core.outcome import Epoch
from paceline.devices import device_of
from paceline.strategies.wheel.config import first_fault
from paceline.strategies.wheel.membership import WorkerProgress
from paceline.strategies.wheel.server import ALL_WORKERS, ParameterServer

MANIFEST = "manifest.json"
_EPOCHS = "epochs.json"
_PREFIX, _PARTIAL = "snapshot-", ".partial"
_FORMAT = 1
_OF_GPU = "random/cuda"  # the state of its random number generator
_MAX_DIFFERENCES = 3  # that an error lists
_CONFIG = ConfigDict(extra="forbid")
Tensors = dict[str, Tensor]


@dataclass(frozen=True, config=_CONFIG)
class OptimizerScalars:
    """An optimizer without its tensors.

    `groups` are its parameter groups, each with the names of its parameters under "params";
    `state` maps a parameter's name to the numbers of its state.
    """

    kind: str
    groups: list[dict[str, Any]]
    state: dict[str, dict[str, Any]]


@dataclass(frozen=True, config=_CONFIG)
class Manifest:
    """The JSON of a checkpoint, after `version` updates; `tensors` names the file beside it."""

    run_id: str
    layout: str
    version: int
    workers: list[WorkerProgress]
    staleness: dict[int, int]
    tensors: str
    optimizer: OptimizerScalars
    format_version: int = _FORMAT


class Checkpoints:
    """Saves a server to a folder every `every_s` seconds; without a folder, never."""

    def __init__(
        self, folder: Path | None, every_s: float, server: ParameterServer, run_id: str, layout: str
    ) -> None:
        self._folder, self._every_s = folder, every_s
        self._server, self._run_id, self._layout = server, run_id, layout
        self._saved_s, self._version = time.monotonic(), server.version

    def save(self, epochs: list[Epoch], *, if_due: bool = False) -> None:
        """Save a checkpoint, unless there was no update since the last one, or it is not due."""
        is_early = if_due and time.monotonic() - self._saved_s < self._every_s
        if is_early or self._folder is None or self._server.version == self._version:
            return
        save(self._folder, self._server, run_id=self._run_id, layout=self._layout)
        text = json.dumps([asdict(epoch) for epoch in epochs])
        _write(self._folder / _EPOCHS, lambda path: path.write_text(text))
        self._saved_s, self._version = time.monotonic(), self._server.version

    def resume(self, epochs: list[Epoch], steps_per_epoch: int) -> str:
        """Load the checkpoint into the server and `epochs`; return a line about it for the log.

        Raises InvalidInput if there is none, or it is of another run.
        """
        if self._folder is None:
            raise InvalidInput("resume: name the folder of the snapshots, too")
        manifest = load(self._folder, self._server, layout=self._layout)
        self._version = self._server.version
        steps = [worker.next_step for worker in manifest.workers]
        path = self._folder / _EPOCHS
        try:
            known = TypeAdapter(list[Epoch]).validate_json(path.read_bytes())
        except FileNotFoundError:  # killed between the manifest and this file
            known = []
        except (OSError, ValidationError) as error:
            raise InvalidInput(f"{path}: cannot be read: {error}") from None
        # A slower worker may go on in an epoch that the others have completed: it is tested again.
        epochs += known[: min(steps) // steps_per_epoch]
        written_s = (self._folder / MANIFEST).stat().st_mtime
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(written_s))
        return (
            f"resumed from {self._folder}, written at {at} after {manifest.version} updates "
            f"(workers at steps {steps}); updates made after that are lost, at most those of "
            f"{self._every_s:g} s, and are made again"
        )


def save(folder: Path, server: ParameterServer, *, run_id: str, layout: str) -> Manifest:
    """Write a checkpoint of the server, and remove the one before.

    Parameters, buffers, the optimizer's state, the random number generators of this process, and
    the progress of each worker. Raises InvalidInput if it cannot be written; then the one before
    is still there.
    """
    scalars, tensors = _optimizer_parts(server.optimizer, server.model)
    tensors |= _model_tensors(server.model)
    tensors["random/cpu"] = torch.get_rng_state()
    device = device_of(server.halves.head_parameters[0].device)
    if (state := device.random_state()) is not None:
        tensors[_OF_GPU] = state
    # safetensors wants tensors of host memory that share none of it.
    copies = {
        name: tensor.cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    name = f"{_PREFIX}{server.version}-{secrets.token_hex(4)}.safetensors"
    workers, staleness = server.workers.progress(), dict(server.updates.staleness[ALL_WORKERS])
    manifest = Manifest(run_id, layout, server.version, workers, staleness, name, scalars)
    # Not by pydantic, whose JSON has no infinite numbers.
    text = json.dumps(asdict(manifest), indent=1) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / name, lambda path: save_file(copies, path))
        _write(folder / MANIFEST, lambda path: path.write_text(text))
    except (OSError, SafetensorError) as error:
        raise InvalidInput(
            f"{folder}: the snapshot cannot be written, and the one before is kept: {error}"
        ) from error
    # Earlier ones, and those of which an interrupted save wrote no manifest.
    for path in folder.glob(f"{_PREFIX}*.safetensors"):
        if path.name != name:
            path.unlink(missing_ok=True)
    return manifest


def load(
    folder: Path, server: ParameterServer, *, layout: str, run_id: str | None = None
) -> Manifest:
    """Load the checkpoint in `folder` into a new server, and return its manifest.

    The values of the checkpoint replace the server's, learning rates among them. Raises
    InvalidInput if there is none, or it is one of another run, layout, model, optimizer or number
    of workers, and names the difference; nothing is changed then.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise InvalidInput(f"{folder}: there is no snapshot, as it has no {MANIFEST}")
    for what, wanted, found in (
        ("run", run_id, manifest.run_id),
        ("layout", layout, manifest.layout),
        ("number of workers", len(server.workers.all), len(manifest.workers)),
    ):
        if wanted not in (None, found):
            raise InvalidInput(f"{folder}: the snapshot's {what} is {found}, not {wanted}")
    path = folder / manifest.tensors
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise InvalidInput(f"{path}: the snapshot cannot be read: {error}") from error
    try:
        own = _model_tensors(server.model)
        _check_fits(own, tensors)
        state = _optimizer_state(manifest.optimizer, tensors, server.optimizer, server.model)
    except InvalidInput as error:
        raise InvalidInput(f"{folder}: the snapshot does not fit: {error}") from None
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
    server.optimizer.load_state_dict(state)
    torch.set_rng_state(tensors["random/cpu"])
    if _OF_GPU in tensors:
        device_of(server.halves.head_parameters[0].device).set_random_state(tensors[_OF_GPU])
    server.restore(manifest.version, manifest.workers, manifest.staleness)
    return manifest


def read_manifest(folder: Path) -> Manifest | None:
    """Return a folder's manifest, or None; InvalidInput if unreadable or of another format."""
    path = folder / MANIFEST
    try:
        fields = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path}: the snapshot cannot be read: {error}") from error
    found = fields.get("format_version") if isinstance(fields, dict) else None
    if found != _FORMAT:
        raise InvalidInput(f"{path}: a snapshot of format {found}; this version reads {_FORMAT}")
    try:
        manifest = TypeAdapter(Manifest).validate_python(fields)
    except ValidationError as error:
        raise InvalidInput(f"{path}: {first_fault(error)}") from None
    # A manifest is no way to have any other file of the machine read.
    if Path(manifest.tensors).name != manifest.tensors:
        raise InvalidInput(f"{path}: tensors: {manifest.tensors!r} is not a file beside it")
    return manifest


def _write(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file: after a kill or a power failure it is there whole, or not at all."""
    # A folder of its own, as the libraries that write have temporary files, too.
    folder = path.parent / _PARTIAL
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        write(folder / path.name)
        _flush(folder / path.name)
        (folder / path.name).replace(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    _flush(path.parent)  # a rename is on the disk once its folder is


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _model_tensors(model: nn.Module) -> Tensors:
    """Return the parameters and buffers of a model's state, shared ones once."""
    tensors: Tensors = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise InvalidInput(f"{name!r} of the model's state is no tensor, and cannot be saved")
        if id(value) not in seen:
            seen.add(id(value))
            tensors[f"model/{name}"] = value.detach()
    return tensors


def _optimizer_parts(optimizer: Optimizer, model: nn.Module) -> tuple[OptimizerScalars, Tensors]:
    """Return the optimizer's numbers and its tensors; InvalidInput if it has anything else."""
    names, known = _parameter_names(optimizer, model), optimizer.state_dict()
    tensors: Tensors = {}

    def scalars_of(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        scalars = {}
        for key, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"{prefix}/{key}"] = value.detach()
            elif _is_plain(value):
                scalars[key] = value
            else:
                raise InvalidInput(
                    f"the optimizer's {key!r} is {type(value).__name__}, which cannot be saved"
                )
        return scalars

    groups = [
        scalars_of(group, f"group/{index}") | {"params": [names[one] for one in group["params"]]}
        for index, group in enumerate(known["param_groups"])
    ]
    state = {
        names[number]: scalars_of(values, f"state/{names[number]}")
        for number, values in known["state"].items()
    }
    return OptimizerScalars(type(optimizer).__name__, groups, state), tensors


def _optimizer_state(
    saved: OptimizerScalars, tensors: Mapping[str, Tensor], optimizer: Optimizer, model: nn.Module
) -> dict[str, Any]:
    """Return the argument of `optimizer.load_state_dict`; InvalidInput if it does not fit."""
    kind, names = type(optimizer).__name__, _parameter_names(optimizer, model)
    if saved.kind != kind:
        raise InvalidInput(f"its optimizer is {saved.kind}, and not {kind}")
    groups, known = [], optimizer.state_dict()["param_groups"]
    named = [[names[one] for one in group["params"]] for group in known]
    if [group.get("params") for group in saved.groups] != named:
        raise InvalidInput(f"its {kind} has other groups of parameters")
    for index, (group, now) in enumerate(zip(saved.groups, known, strict=True)):
        # JSON has lists only: what is a tuple in this optimizer was one.
        tuples = {
            key: tuple(group[key])
            for key, value in now.items()
            if isinstance(value, tuple) and isinstance(group.get(key), list)
        }
        own = _under(f"group/{index}/", tensors)
        groups.append(group | tuples | own | {"params": now["params"]})
    state = {
        number: saved.state[name] | _under(f"state/{name}/", tensors)
        for number, name in enumerate(names)
        if name in saved.state
    }
    return {"state": state, "param_groups": groups}


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> Tensors:
    """Return the tensors whose names begin so, by the rest of their names."""
    return {name[len(prefix) :]: one for name, one in tensors.items() if name.startswith(prefix)}


def _parameter_names(optimizer: Optimizer, model: nn.Module) -> list[str]:
    """Return the parameters' names in the order in which the optimizer numbers them."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    try:
        return [names[id(one)] for group in optimizer.param_groups for one in group["params"]]
    except KeyError:
        raise InvalidInput(
            "the optimizer has a parameter that is none of the model's, and cannot be saved"
        ) from None


def _is_plain(value: object) -> bool:
    """Return True if JSON can hold a value."""
    if isinstance(value, list | tuple):
        return all(_is_plain(one) for one in value)
    return value is None or isinstance(value, bool | int | float | str)


def _check_fits(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Raise InvalidInput that names tensors of the model which the checkpoint does not fit."""
    wanted, saved = (
        {
            name: f"{'x'.join(map(str, tensor.shape)) or 'scalar'} "
            f"{str(tensor.dtype).removeprefix('torch.')}"
            for name, tensor in _under("model/", known).items()
        }
        for known in (own, tensors)
    )
    found = [f"{name!r} is not in it" for name in wanted.keys() - saved.keys()]
    found += [f"{name!r} is not in the model" for name in saved.keys() - wanted.keys()]
    found += [
        f"{name!r} is {saved[name]}, and not {wanted[name]}"
        for name in wanted.keys() & saved.keys()
        if wanted[name] != saved[name]
    ]
    if found:
        num_more = len(found) - _MAX_DIFFERENCES
        more = f", and {num_more} more" if num_more > 0 else ""
        raise InvalidInput("; ".join(sorted(found)[:_MAX_DIFFERENCES]) + more)
    if "random/cpu" not in tensors:
        raise InvalidInput("it has no state of the random numbers")
