"""Tensors of simulated devices, and what happens to operations on them.

A tensor's values lie in host memory, `raw`, which only the threads of streams may touch. Shapes and
types of results are known at once, from the same operation on tensors without values ("meta").
"""

import atexit
import weakref
from collections.abc import Sequence
from contextlib import suppress
from copy import deepcopy
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from paceline.devices.ordering import Block
from paceline.devices.simulated import (
    NAME,
    Memory,
    SimulatedDevice,
    extent_nbytes,
    poison,
)

aten: Any = torch.ops.aten
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
    def __new__(cls, raw: Tensor, *_: object) -> "SimulatedTensor":
        """Return a tensor of the same shape, strides and type, which torch takes for a device's."""
        made: SimulatedTensor = Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device(NAME, 0),
        )
        return made

    def __init__(self, raw: Tensor, block: Block, owner: _Owner) -> None:
        self.raw, self.owner = raw, owner
        start = int(raw.storage_offset()) * raw.element_size()
        self.memory = Memory(block, start, start + extent_nbytes(raw))

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        """Return the values, and that they are simulated."""
        return f"Simulated{self.detach().cpu()!r}"

    def __format__(self, spec: str) -> str:
        """Format the only value."""
        return format(self.item() if self.dim() == 0 else repr(self), spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a copy that the device makes, with a copy of the gradient."""
        if id(self) not in memo:
            copied = self.detach().clone()
            if isinstance(self, nn.Parameter):
                copied = nn.Parameter(copied)
            copied.requires_grad_(self.requires_grad)
            if self.grad is not None:
                copied.grad = deepcopy(self.grad, memo)
            memo[id(self)] = copied
        return memo[id(self)]

    @property
    def data(self) -> Tensor:
        """The values without their history; assigning makes this tensor look at others' memory."""
        return Tensor.data.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @data.setter
    def data(self, other: Tensor) -> None:
        assert isinstance(other, SimulatedTensor)
        Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self.raw, self.memory, self.owner = other.raw, other.memory, other.owner

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # a class method, as torch wants it
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Do an operation of which an argument is on a simulated device."""
        return _dispatch(func, args, kwargs or {})


def devices(count: int) -> list[SimulatedDevice]:
    """Return the first so many simulated devices, making torch know them."""
    if not _devices:
        # A thread that is killed inside torch when the interpreter ends would abort the process.
        atexit.register(_end)
        _setup_privateuseone_for_python_backend(NAME)
        # As with CUDA a parameter stays the same object when its module is moved: ties stay tied.
        torch.__future__.set_swap_module_params_on_conversion(True)
        for packet, overload in (("empty", "memory_format"), ("empty_strided", "default")):
            func = getattr(getattr(aten, packet), overload)
            name = packet if overload == "default" else f"{packet}.{overload}"
            _library.impl(name, partial(_created, func), "PrivateUse1")
    while len(_devices) < count:
        _devices.append(SimulatedDevice(len(_devices)))
    return _devices[:count]


def _end() -> None:
    for device in _devices:
        with suppress(RuntimeError):
            device.synchronize()


_library = torch.library.Library("aten", "IMPL")


def _created(func: Any, *args: Any, **kwargs: Any) -> Any:
    return _dispatch(func, args, kwargs)


def _dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    device = _devices[0]
    if func is aten.copy_.default:
        return _copied(device, *args, **kwargs)
    if func is aten._to_copy.default and _names_host(kwargs):
        device.num_blocking_copies += 1
        return _at_once(device, func, args, kwargs)
    if func.namespace == "c10d" or torch.Tag.nondeterministic_seeded in func.tags:
        return _at_once(device, func, args, kwargs)
    aliases = [one.alias_info for one in func._schema.returns]
    if any(alias is not None and not alias.is_write for alias in aliases):
        return _viewed(func, args, kwargs)
    return _queued(device, func, args, kwargs)


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
    return tree_map(lambda raw: SimulatedTensor(raw, base.memory.block, base.owner), found)


def _owned(device: SimulatedDevice, raw: Tensor) -> SimulatedTensor:
    block, owner = Block(device.current_stream().number), _Owner()
    weakref.finalize(owner, device.free, block, raw).atexit = False
    return SimulatedTensor(raw, block, owner)


def _at_once(device: SimulatedDevice, func: Any, args: Any, kwargs: Any) -> Any:
    """Have the host do it, once the current stream is done: it needs values."""
    device.current_stream().synchronize()
    own = {id(_raw(one)): one for one in _tensors(args, kwargs)}
    found = func(*tree_map(_raw, args), **_on("cpu", tree_map(_raw, kwargs)))

    def result(one: Any) -> Any:
        if not isinstance(one, Tensor) or _names_host(kwargs):
            return one
        return own[id(one)] if id(one) in own else _owned(device, one)

    return tree_map(result, found)


def _queued(device: SimulatedDevice, func: Any, args: Any, kwargs: Any) -> Any:
    """Queue an operation, and return its results, which are not written yet."""
    twins: dict[int, Tensor] = {}

    def without_values(one: Any) -> Any:
        if not isinstance(one, Tensor):
            return one
        if id(one) not in twins:
            twins[id(one)] = torch.empty_strided(
                one.size(), one.stride(), dtype=one.dtype, device="meta"
            )
        return twins[id(one)]

    try:
        meta_args, meta_kwargs = tree_map(without_values, (args, _on("meta", kwargs)))
        expected = func(*meta_args, **meta_kwargs)
    except (NotImplementedError, RuntimeError):
        return _at_once(device, func, args, kwargs)  # it depends on values, or is wrong
    if any(not isinstance(one, Tensor) for one in tree_leaves(expected) if one is not None):
        return _at_once(device, func, args, kwargs)  # the host asks for a number
    own = {id(twins[id(one)]): one for one in _tensors(args, kwargs)}
    made: list[SimulatedTensor] = []

    def result(twin: Any) -> Any:
        if twin is None or id(twin) in own:
            return None if twin is None else own[id(twin)]
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
    device.current_stream().put(call, str(func), accesses)
    return results


def _now(value: Any) -> Any:
    """Return what the stream will work on; the host's tensors as they are now."""
    if isinstance(value, SimulatedTensor):
        return value.raw
    return value.clone() if isinstance(value, Tensor) else value


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> set[int]:
    """Return the ids of the tensors that an operation writes to."""
    found: set[int] = set()
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found |= {id(one) for one in _tensors(value)}
    return found


def _copied(
    device: SimulatedDevice, target: Tensor, source: Tensor, non_blocking: bool = False
) -> Tensor:
    """Queue a copy. Between host and device the host waits, unless the host's memory is pinned."""
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
