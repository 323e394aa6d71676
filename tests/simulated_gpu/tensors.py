"""Tensors on simulated devices, and the execution of their operations.

A tensor's values are in host memory, `raw`, which only the threads of streams may access. The same
operation on tensors of the meta device gives the shapes and dtypes of results immediately.
"""

import atexit
import itertools
import weakref
from collections.abc import Sequence
from contextlib import suppress
from copy import deepcopy
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, library, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from simulated_gpu.device import (
    NAME,
    Memory,
    SimulatedDevice,
    SimulatedEvent,
    extent_nbytes,
    nothing,
    poison,
)
from simulated_gpu.guard import DeviceModule, guard, set_calls
from simulated_gpu.kernels import num_kernels
from simulated_gpu.ordering import Block

aten: Any = torch.ops.aten
_MOST_EVENTS = 10_000  # kept for autograd, which waits for events of a backward pass
_kernels = library.Library("aten", "IMPL")
# The basic operations that create tensors without input tensors.
_CREATING = (
    *("empty.memory_format", "empty_strided.default", "eye.default", "eye.m"),
    *("arange.default", "arange.start", "arange.start_step"),
)
_devices: list[SimulatedDevice] = []


class _Owner:
    """Owner of memory, referenced by all tensors that share it; its end frees the memory."""


class SimulatedTensor(Tensor):
    """A tensor on a simulated device."""

    raw: Tensor
    memory: Memory
    owner: _Owner

    __torch_function__: ClassVar[Any] = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(
        cls, raw: Tensor, block: Block, owner: _Owner, device: torch.device
    ) -> "SimulatedTensor":
        """Return a tensor like `raw` that torch treats as a tensor on `device`."""
        made: SimulatedTensor = Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=device,
        )
        return made

    def __init__(self, raw: Tensor, block: Block, owner: _Owner, device: torch.device) -> None:
        self.raw, self.owner = raw, owner
        start = int(raw.storage_offset()) * raw.element_size()
        self.memory = Memory(block, start, start + extent_nbytes(raw))

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        """Return the values, prefixed with "Simulated"."""
        return f"Simulated{self.detach().cpu()!r}"

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the storage; its address shows whether tensors share memory."""
        return self.raw.untyped_storage()

    def data_ptr(self) -> int:
        """Return the address; equal addresses show that tensors share memory."""
        return self.raw.data_ptr()

    def tolist(self) -> Any:
        """Return the values as numbers; torch does not support this for subclasses."""
        return self.detach().cpu().tolist()

    @property
    def data(self) -> Tensor:
        """A tensor with the same memory, detached from autograd."""
        found: Tensor = Tensor.data.__get__(self)  # type: ignore[attr-defined]
        return found

    @data.setter
    def data(self, value: Tensor) -> None:
        """Use another tensor's memory, as when a module is moved or cast."""
        assert isinstance(value, SimulatedTensor)
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.raw, self.memory, self.owner = value.raw, value.memory, value.owner

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the tensor and its gradient on the device."""
        if id(self) not in memo:
            copied: Tensor = self.detach().clone()
            if isinstance(self, nn.Parameter):
                copied = nn.Parameter(copied)
            copied.requires_grad_(self.requires_grad)
            if self.grad is not None:
                copied.grad = deepcopy(self.grad, memo)
            memo[id(self)] = copied
        return memo[id(self)]

    def _refuse_tracing(*_: object) -> NoReturn:
        raise TypeError("torch.compile cannot trace tensors of simulated devices")

    # With both methods, torch swaps a moved module's parameters instead of replacing them. So a
    # parameter stays the same object, as with CUDA, and tied weights stay tied. torch.compile calls
    # the methods, too.
    __tensor_flatten__ = __tensor_unflatten__ = _refuse_tracing

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # a class method, as torch wants it
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Execute an operation with an argument on a simulated device."""
        return _dispatch(func, args, kwargs or {})


def devices(count: int) -> list[SimulatedDevice]:
    """Return the first `count` simulated devices; the first call registers all with torch.

    Call it before the process's first backward pass, in which torch starts a thread per registered
    device.
    """
    if not _devices:
        _register()
    assert count <= len(_devices)
    return _devices[:count]


def _register() -> None:
    num_devices = guard().num_devices()  # before torch registers its Python guard
    _setup_privateuseone_for_python_backend(NAME, DeviceModule())
    for name in _CREATING:
        made = partial(_created, attrgetter(name)(aten))
        _kernels.impl(name.removesuffix(".default"), made, "PrivateUse1")
    # For copies that bypass __torch_dispatch__, as in torch.tensor().
    copy_from = lambda source, target, *how: _copied(target, source, *how)  # noqa: E731
    _kernels.impl("_copy_from", copy_from, "PrivateUse1")
    _devices.extend(SimulatedDevice(index) for index in range(num_devices))
    events: dict[int, SimulatedEvent] = {}  # by which autograd orders its nodes' streams
    numbers = itertools.count()

    def record(device: int, stream: int) -> int:
        number = next(numbers)
        events[number] = _devices[device].stream(stream).record()
        events.pop(number - _MOST_EVENTS, None)
        return number

    def wait(event: int, device: int, stream: int) -> None:
        _devices[device].stream(stream).wait_event(events[event])

    set_calls(record, wait)
    # The interpreter's exit kills threads; killing one inside torch would abort the process.
    atexit.register(_end)


def _end() -> None:
    for device in _devices:
        with suppress(RuntimeError):
            device.synchronize()


def _created(func: Any, *args: Any, **kwargs: Any) -> Any:
    return _dispatch(func, args, kwargs)


@torch.compiler.disable  # type: ignore[untyped-decorator] # torch's decorator is untyped
def _dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    if func is aten.copy_.default:
        return _copied(*args, **kwargs)
    device = _device_of(args, kwargs)
    if func is aten._to_copy.default and _names_host(kwargs):
        device.num_blocking_copies += 1
        return _at_once(device, func, args, kwargs)
    if func.namespace == "c10d" or torch.Tag.nondeterministic_seeded in func.tags:
        return _at_once(device, func, args, kwargs)
    aliases = [one.alias_info for one in func._schema.returns]
    if any(alias is not None and not alias.is_write for alias in aliases):
        return _viewed(func, args, kwargs)
    return _queued(device, func, args, kwargs)


def _device_of(args: Any, kwargs: Any) -> SimulatedDevice:
    """Return the device of the arguments, or the device on which to create a tensor."""
    numbers = {one.device.index for one in _simulated(args, kwargs)}
    asked = torch.device(kwargs.get("device") or "cpu")
    if asked.type == NAME:
        numbers.add(guard().get_device() if asked.index is None else asked.index)
    if len(numbers) > 1:
        raise RuntimeError(f"an operation between simulated devices {sorted(numbers)}")
    return _devices[numbers.pop()]


def _tensors(*values: Any) -> list[Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, Tensor)]


def _simulated(*values: Any) -> list[SimulatedTensor]:
    return [one for one in tree_leaves(values) if isinstance(one, SimulatedTensor)]


def _raw(value: Any) -> Any:
    return value.raw if isinstance(value, SimulatedTensor) else value


def _names_host(kwargs: dict[str, Any]) -> bool:
    return kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu"


def _on(device: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    return kwargs if kwargs.get("device") is None else kwargs | {"device": torch.device(device)}


def _viewed(func: Any, args: Any, kwargs: Any) -> Any:
    """Return views immediately, because they access no values."""
    base = _simulated(args, kwargs)[0]
    found = func(*tree_map(_raw, args), **tree_map(_raw, kwargs))
    block, owner, device = base.memory.block, base.owner, base.device
    return tree_map(lambda raw: SimulatedTensor(raw, block, owner, device), found)


def _owned(device: SimulatedDevice, raw: Tensor) -> SimulatedTensor:
    block, owner = Block(device.current_stream().number), _Owner()
    weakref.finalize(owner, device.free, block, raw).atexit = False
    return SimulatedTensor(raw, block, owner, device.torch_device)


def _at_once(device: SimulatedDevice, func: Any, args: Any, kwargs: Any) -> Any:
    """Execute an operation that needs values on the host, after the current stream's work.

    Other streams must wait for this stream before they use the results, as for NCCL collectives.
    """
    stream, what, written = device.current_stream(), str(func), _written(func, args, kwargs)
    used = [(one.memory, id(one) in written) for one in _simulated(args, kwargs)]
    stream.put(nothing, what, used)
    stream.synchronize()
    own = {id(_raw(one)): one for one in _tensors(args, kwargs)}
    found = func(*tree_map(_raw, args), **_on("cpu", tree_map(_raw, kwargs)))

    def result(one: Any) -> Any:
        if not isinstance(one, Tensor) or _names_host(kwargs):
            return one
        return own[id(one)] if id(one) in own else _owned(device, one)

    results = tree_map(result, found)
    made = [(one.memory, True) for one in _simulated(results) if id(one) not in map(id, args)]
    stream.put(nothing, what, made + [access for access in used if access[1]])
    return results


def _without_values(func: Any, args: Any, kwargs: Any) -> tuple[Any, dict[int, Tensor]] | None:
    """Execute an operation on the meta device.

    Returns the results, and each argument by the id of its meta tensor. Returns None if the
    operation needs values, returns a number, or fails.
    """
    twins: dict[int, Tensor] = {}

    def twin_of(one: Any) -> Any:
        if not isinstance(one, Tensor):
            return one
        if id(one) not in twins:
            twins[id(one)] = torch.empty_strided(
                one.size(), one.stride(), dtype=one.dtype, device="meta"
            )
        return twins[id(one)]

    try:
        meta_args, meta_kwargs = tree_map(twin_of, (args, _on("meta", kwargs)))
        expected = func(*meta_args, **meta_kwargs)
    except (NotImplementedError, RuntimeError):
        return None
    if any(not isinstance(one, Tensor) for one in tree_leaves(expected) if one is not None):
        return None
    own = {id(twins[id(one)]): one for one in _tensors(args, kwargs)}
    for twin in _tensors(expected):
        if id(twin) in own and own[id(twin)].shape != twin.shape:
            raise RuntimeError(f"{func}: a tensor on a simulated device cannot be resized")
    return expected, own


def _queued(device: SimulatedDevice, func: Any, args: Any, kwargs: Any) -> Any:
    """Queue an operation, and return its results before they are written."""
    if (known := _without_values(func, args, kwargs)) is None:
        return _at_once(device, func, args, kwargs)
    expected, own = known
    made: list[SimulatedTensor] = []

    def result(twin: Any) -> Any:
        if twin is None or id(twin) in own:
            return own.get(id(twin))
        raw = torch.empty_strided(twin.size(), twin.stride(), dtype=twin.dtype)
        poison(raw)
        made.append(_owned(device, raw))
        return made[-1]

    results = tree_map(result, expected)
    raw_args, raw_kwargs = tree_map(_now, (args, _on("cpu", kwargs)))
    given = {id(one) for one in _tensors(raw_args, raw_kwargs)}
    targets = [one.raw for one in made]

    def call() -> None:
        found = _tensors(func(*raw_args, **raw_kwargs))
        fresh = [one for one in found if id(one) not in given]
        for target, one in zip(targets, fresh, strict=True):
            target.copy_(one)

    written = _written(func, args, kwargs)
    accesses = [(one.memory, id(one) in written) for one in _simulated(args, kwargs)]
    accesses += [(one.memory, True) for one in made]
    device.current_stream().put(call, str(func), accesses, num_kernels(func, args))
    return results


def _now(value: Any) -> Any:
    """Return the stream's argument: device memory, or a copy of a host tensor's present values."""
    if isinstance(value, SimulatedTensor):
        return value.raw
    return value.clone() if isinstance(value, Tensor) else value


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> set[int]:
    """Return the ids of the tensors that an operation writes to."""
    if func.namespace == "c10d":  # its schemas do not declare writes
        return (
            set() if func is torch.ops.c10d.send.default else {id(one) for one in _tensors(args[0])}
        )
    found: set[int] = set()
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found |= {id(one) for one in _tensors(value)}
    return found


def _copied(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Queue a copy; the host waits for a copy to or from host memory that is not pinned."""
    device = _device_of((target, source), {})
    stream = device.current_stream()
    if isinstance(target, SimulatedTensor) and isinstance(source, SimulatedTensor):
        accesses = [(source.memory, False), (target.memory, True)]
        stream.put(partial(target.raw.copy_, source.raw), "aten.copy_.default", accesses)
        return target
    inwards = isinstance(target, SimulatedTensor)
    of_host = source if inwards else target
    pinned = device.pinned(of_host)
    same = (target.dtype, target.stride()) == (source.dtype, source.stride())
    is_blocking = not (non_blocking and same and pinned is not None)
    if is_blocking:
        device.num_blocking_copies += 1
    elif not inwards:
        of_host.fill_(torch.nan if of_host.is_floating_point() else -1)  # until the copy is done
    accesses = [(one.memory, inwards) for one in _simulated(target, source)]
    if pinned is not None:
        accesses.append((pinned, not inwards))
    stream.put(partial(_raw(target).copy_, _raw(source)), "h2d" if inwards else "d2h", accesses)
    if is_blocking:
        stream.synchronize()
    return target
