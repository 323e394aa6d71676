"""Tensors of simulated devices, and what happens to operations on them.

A tensor's values lie in host memory, `raw`, which only the threads of streams may touch. Shapes and
types of results are known at once, from the same operation on tensors without values ("meta").
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

from paceline.core.errors import InvalidInput
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
_MOST_EVENTS = 10_000  # of one backward pass that autograd may still wait for
_kernels = library.Library("aten", "IMPL")
# Operations that make tensors of none, and are not made of others of these.
_CREATING = (
    *("empty.memory_format", "empty_strided.default", "eye.default", "eye.m"),
    *("arange.default", "arange.start", "arange.start_step"),
)
_devices: list[SimulatedDevice] = []


class _Owner:
    """Held by all tensors that share memory: with the last of them it is given back."""


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
        """Return a tensor of the same shape, strides and type, which torch takes for a device's."""
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
        """Return the values, and that they are simulated."""
        return f"Simulated{self.detach().cpu()!r}"

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the memory, by which those are told that share it."""
        return self.raw.untyped_storage()

    def __format__(self, spec: str) -> str:
        """Format the only value."""
        return format(self.item() if self.dim() == 0 else repr(self), spec)

    def data_ptr(self) -> int:
        """Return the address, by which it is known whether tensors share memory."""
        return self.raw.data_ptr()

    def tolist(self) -> Any:
        """Return the values as numbers, which torch does itself for its own tensors alone."""
        return self.detach().cpu().tolist()

    @property
    def data(self) -> Tensor:
        """The same memory, unknown to autograd."""
        found: Tensor = Tensor.data.__get__(self)  # type: ignore[attr-defined]
        return found

    @data.setter
    def data(self, value: Tensor) -> None:
        """Take over another tensor's memory, as modules do that are moved or cast."""
        assert isinstance(value, SimulatedTensor)
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.raw, self.memory, self.owner = value.raw, value.memory, value.owner

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a copy that the device makes, with a copy of the gradient."""
        if id(self) not in memo:
            is_parameter = isinstance(self, nn.Parameter)
            copied = _of_kind(self.detach().clone(), is_parameter, self.requires_grad)
            if self.grad is not None:
                copied.grad = deepcopy(self.grad, memo)
            memo[id(self)] = copied
        return memo[id(self)]

    def _refuse_tracing(*_: object) -> NoReturn:
        raise TypeError("torch.compile cannot trace tensors of simulated devices")

    # A tensor that has both is swapped, and not replaced, when its module is moved: as with CUDA a
    # parameter stays the same object then, and ties stay tied. torch.compile asks for them, too.
    __tensor_flatten__ = __tensor_unflatten__ = _refuse_tracing

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return how to make it again from its values."""
        values, is_parameter = self.detach().cpu(), isinstance(self, nn.Parameter)
        return _rebuilt, (values, self.device.index, is_parameter, self.requires_grad)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # a class method, as torch wants it
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Do an operation of which an argument is on a simulated device."""
        return _dispatch(func, args, kwargs or {})


def _rebuilt(values: Tensor, index: int, is_parameter: bool, requires_grad: bool) -> Tensor:
    made = values.to(devices(index + 1)[index].torch_device)
    return _of_kind(made, is_parameter, requires_grad)


def _of_kind(made: Tensor, is_parameter: bool, requires_grad: bool) -> Tensor:
    return (nn.Parameter(made) if is_parameter else made).requires_grad_(requires_grad)


def devices(count: int) -> list[SimulatedDevice]:
    """Return the first so many simulated devices, making torch know them.

    The first call comes before the first backward pass of the process: torch makes its threads for
    the devices then, and none for those of later.
    """
    if not _devices:
        _register()
    if count > len(_devices):
        raise InvalidInput(
            "PACELINE_SIMULATED_GPUS",
            f"{count} simulated GPUs asked for",
            hint=f"there are {len(_devices)} at most",
        )
    return _devices[:count]


def _register() -> None:
    num_devices = guard().num_devices()  # before torch registers one that is written in Python
    _setup_privateuseone_for_python_backend(NAME, DeviceModule(num_devices))
    for name in _CREATING:
        made = partial(_created, attrgetter(name)(aten))
        _kernels.impl(name.removesuffix(".default"), made, "PrivateUse1")
    # Where torch leaves out the dispatch to Python, as torch.tensor() does, it comes here.
    copy_from = lambda source, target, *how: _copied(target, source, *how)  # noqa: E731
    _kernels.impl("_copy_from", copy_from, "PrivateUse1")
    _devices.extend(SimulatedDevice(index) for index in range(num_devices))
    events: dict[int, SimulatedEvent] = {}  # of autograd, between the streams of its nodes
    numbers = itertools.count()

    def record(device: int, stream: int) -> int:
        number = next(numbers)
        events[number] = _devices[device].stream(stream).record()
        events.pop(number - _MOST_EVENTS, None)
        return number

    def wait(event: int, device: int, stream: int) -> None:
        _devices[device].stream(stream).wait(events[event])

    set_calls(record, wait)
    # A thread that is killed inside torch when the interpreter ends would abort the process.
    atexit.register(_end)


def _end() -> None:
    for device in _devices:
        with suppress(RuntimeError):
            device.synchronize()


def _created(func: Any, *args: Any, **kwargs: Any) -> Any:
    return _dispatch(func, args, kwargs)


@torch.compiler.disable  # type: ignore[untyped-decorator] # as torch has it
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
    """Return the device of the tensors, or that on which one is to be made."""
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
    """Return views: that touches no values."""
    base = _simulated(args, kwargs)[0]
    found = func(*tree_map(_raw, args), **tree_map(_raw, kwargs))
    block, owner, device = base.memory.block, base.owner, base.device
    return tree_map(lambda raw: SimulatedTensor(raw, block, owner, device), found)


def _owned(device: SimulatedDevice, raw: Tensor) -> SimulatedTensor:
    block, owner = Block(device.current_stream().number), _Owner()
    weakref.finalize(owner, device.free, block, raw).atexit = False
    return SimulatedTensor(raw, block, owner, device.torch_device)


def _at_once(device: SimulatedDevice, func: Any, args: Any, kwargs: Any) -> Any:
    """Have the host do it, once the current stream is done: it needs values.

    What is written is there for others only after this stream, as after a collective of NCCL's.
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
    """Do an operation on tensors without values; return its results, and the arguments by theirs.

    Returns None if it needs values, asks for a number, or is wrong.
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
            raise RuntimeError(f"{func}: no tensor of a simulated device can be resized")
    return expected, own


def _queued(device: SimulatedDevice, func: Any, args: Any, kwargs: Any) -> Any:
    """Queue an operation, and return its results, which are not written yet."""
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
    """Return what the stream will work on; the host's tensors as they are now."""
    if isinstance(value, SimulatedTensor):
        return value.raw
    return value.clone() if isinstance(value, Tensor) else value


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> set[int]:
    """Return the ids of the tensors that an operation writes to."""
    if func.namespace == "c10d":  # whose schemas say nothing of it
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
    """Queue a copy. Between host and device the host waits, unless the host's memory is pinned."""
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
        of_host.fill_(torch.nan if of_host.is_floating_point() else -1)  # until it has arrived
    accesses = [(one.memory, inwards) for one in _simulated(target, source)]
    if pinned is not None:
        accesses.append((pinned, not inwards))
    stream.put(partial(_raw(target).copy_, _raw(source)), "h2d" if inwards else "d2h", accesses)
    if is_blocking:
        stream.synchronize()
    return target
