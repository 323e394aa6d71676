"""Describe a model as a `Workload` by tracing one training step without data.

The step runs on a copy of the model on PyTorch's meta device, where tensors have shapes but no
values, so nothing large is allocated or computed. If this step fails, as for a forward pass that
depends on values (`if x.sum() > 0`), the step runs on a copy on the model's own device. A model
with recurrent layers runs on the CPU, because the meta device decomposes them into time steps.

The passes are divided into segments, one for each layer. A forward segment begins when the layer's
module is entered for the first time; operations before the first layer belong to the first layer. A
backward segment ends when the layer's last gradient has been accumulated.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from paceline.core.error_lines import blamed
from paceline.core.errors import InvalidInput
from paceline.core.workload import Cost, Layer, Parameter, Workload
from paceline.links.devices import random_numbers_restored
from paceline.training.data.batch import call, shapes_of
from paceline.training.models.flops import allocates, flops_of, nbytes_of, tensors_in
from paceline.training.models.fused_attention import attention_as_on_cpu
from paceline.training.models.layers import LayerModule, copied, duplicate, layers_of
from paceline.training.models.live_memory import (
    LiveMemory,
    SegmentActivations,
    storage_of,
    workspace_nbytes,
)


class Lap(NamedTuple):
    """The cost of a part of a training step, and the peak of live tensor bytes in this part."""

    cost: Cost
    peak: int


_NOTHING = Lap(Cost(), 0)
_Laps = Mapping[int, Sequence[Lap]]  # maps a layer to its laps of backward, one per gradient


@dataclass
class _Step:
    """The measurements of one training step; layers are indices into `layers_of(model)`.

    `forward`, `activation_nbytes`, `kept_nbytes`: map each layer to its value, in the order of
    the layers' first calls. `ready`: its keys are the (layer, parameter) pairs whose gradients are
    complete, the earliest first. `laps`: for each gradient, its layer and the cost of backward
    since the previous gradient.
    """

    forward: dict[int, Lap] = field(default_factory=dict)
    activation_nbytes: dict[int, int] = field(default_factory=dict)
    kept_nbytes: dict[int, int] = field(default_factory=dict)
    ready: dict[tuple[int, int], None] = field(default_factory=dict)
    laps: list[tuple[int, Lap]] = field(default_factory=list)

    def enter(self, counter: "CostCounter", index: int, *_: Any) -> None:
        """Begin a layer's segment of the forward pass, unless the layer has run before."""
        if index in self.forward:
            return
        if self.forward:
            self.end_segment(counter)
            counter.activations.segment += 1
        self.forward[index] = _NOTHING

    def end_segment(self, counter: "CostCounter") -> None:
        """Assign the costs of the segment that ends to the most recently entered layer."""
        current = next(reversed(self.forward), 0)  # the first layer, if no layer was entered
        self.forward[current] = counter.lap()

    def accumulated(self, counter: "CostCounter", index: int, number: int, *_: Any) -> None:
        """Record that parameter `number` of layer `index` has its gradient."""
        # Move the entry to the end: if a parameter gets several gradients, the last one counts.
        self.ready.pop((index, number), None)
        self.ready[index, number] = None
        self.laps.append((index, counter.lap()))

    def backward(self) -> _Laps:
        """Return each layer's laps of the backward pass; they end with its last gradient."""
        stops = {layer: number for number, (layer, _) in enumerate(self.laps, 1)}
        found, start = dict[int, list[Lap]](), 0
        for layer, stop in sorted(stops.items(), key=lambda one: one[1]):
            found[layer] = [lap for _, lap in self.laps[start:stop]]
            start = stop
        return found


def describe(model: nn.Module, example_batch: Any, name: str | None = None) -> Workload:
    """Trace a training step of `model` on a batch; return its costs as a `Workload`.

    `example_batch`: a tensor, a sequence of positional arguments, or a mapping of keyword
    arguments. The first dimension of the first tensor is the batch size. The model keeps its mode
    (training or evaluation). The backward pass starts from all outputs that require a gradient.

    Costs are those of the whole batch. A layer's forward segment is the layer's part of the forward
    pass. `activation_nbytes`: bytes of the tensors from this segment that later segments or the
    caller read. `kept_nbytes`: bytes of the tensors from this segment that backward reads.
    `working_nbytes`: the layer's peak of live bytes, without kept tensors and without gradients of
    parameters. Layers without gradients are last in `backward_order`. Layers that the forward pass
    does not call have no forward cost.

    The model and the random states of PyTorch and Python do not change. The model's forward hooks
    run. Raises InvalidInput if nothing is trainable or the step fails.
    """
    label = name or type(model).__name__
    batch = tree_leaves(example_batch)
    if not batch or not all(isinstance(tensor, Tensor) for tensor in batch):
        raise InvalidInput(label, "requires an example batch of tensors")
    if batch[0].dim() == 0 or batch[0].shape[0] == 0:
        problem = "requires an example batch with at least one row"
        raise InvalidInput(label, problem, got=tuple(batch[0].shape))
    layers = layers_of(model)
    if not layers:
        raise InvalidInput(label, "has no trainable parameters")
    step = _trace(model, example_batch, label)
    order, backward = list(step.forward), step.backward()
    for index in range(len(layers)):
        if index not in step.forward:  # insert an uncalled layer after its predecessor in the model
            order.insert(order.index(index - 1) + 1 if index else 0, index)
    never = [index for index in reversed(order) if index not in backward]
    return Workload(
        name=label,
        batch_size=batch[0].shape[0],
        layers=_describe_layers(layers, order, step, backward),
        backward_order=tuple(order.index(index) for index in (*backward, *never)),
        input_nbytes=sum(tensor.numel() * tensor.element_size() for tensor in batch),
    )


def _trace(model: nn.Module, batch: Any, label: str) -> _Step:
    """Run a step on a copy of the model, on the meta device if possible; restore random states."""
    devices = {parameter.device for parameter in model.parameters() if not parameter.is_meta}
    state = random.getstate()
    try:
        with random_numbers_restored(devices), torch.inference_mode(False), torch.enable_grad():
            with attention_as_on_cpu():
                is_recurrent = any(isinstance(one, nn.RNNBase) for one in model.modules())
                device = torch.device("cpu" if is_recurrent else "meta")
                try:
                    there = tree_map(lambda tensor: copied(tensor, device), batch)
                    own = duplicate(model, lambda tensor: copied(tensor, device))
                    with device:
                        return _run(own, there)
                except InvalidInput:
                    raise
                except Exception:  # noqa: S110 - then run it on the model's device
                    pass
            real_batch = tree_map(lambda tensor: tensor.detach().clone(), batch)
            return _run(duplicate(model, torch.clone), real_batch)
    except InvalidInput:
        raise
    except Exception as error:
        problem = f"cannot run a training step on a batch of shape {shapes_of(batch)}"
        raise InvalidInput(label, f"{problem}: {blamed(error)}") from error
    finally:
        random.setstate(state)


def _run(model: nn.Module, batch: Any) -> _Step:
    """Run a forward and a backward pass, and return their costs; leaves hooks on `model`."""
    step, counter = _Step(), CostCounter()
    activations = counter.activations
    for index, layer in enumerate(layers_of(model)):
        enter = partial(step.enter, counter, index)
        layer.module.register_forward_pre_hook(enter, prepend=True)
        for number, (_, parameter) in enumerate(layer.parameters):
            accumulated = partial(step.accumulated, counter, index, number)
            parameter.register_post_accumulate_grad_hook(accumulated)
    with counter:
        outputs = list(tensors_in(call(model, batch)))
    step.end_segment(counter)
    activations.read(outputs, outside=True)
    segments = list(enumerate(step.forward))
    step.activation_nbytes = {index: activations.nbytes(i) for i, index in segments}
    activations.in_backward = True
    trained = [output for output in outputs if output.requires_grad]
    if not trained:
        raise InvalidInput("model", "has no output that depends on a trainable parameter")
    gradients = [torch.ones_like(output) for output in trained]
    counter.alive.made(gradients)
    counter.lap()
    with counter:
        torch.autograd.backward(trained, gradients)
    if step.laps:  # the layer of the last gradient also gets the remaining work
        step.laps.append((step.laps[-1][0], counter.lap()))
    step.kept_nbytes = {index: activations.kept_nbytes(i) for i, index in segments}
    return step


def _describe_layers(
    layers: Sequence[LayerModule], order: list[int], step: _Step, backward: _Laps
) -> tuple[Layer, ...]:
    working = _working(layers, step, backward)
    described: list[Layer] = []
    for index in order:
        before = described[-1].activation_nbytes if described else 0
        own = layers[index].parameters
        numbers = [number for (of, number) in step.ready if of == index]
        numbers += [number for number in range(len(own)) if number not in numbers]
        in_ready_order = (own[number] for number in numbers)
        described.append(
            Layer(
                name=layers[index].name,
                parameters=tuple(
                    Parameter(name, tuple(p.shape), p.element_size()) for name, p in in_ready_order
                ),
                activation_nbytes=step.activation_nbytes.get(index, before),
                forward=step.forward.get(index, _NOTHING).cost,
                backward=sum((lap.cost for lap in backward.get(index, ())), Cost()),
                kept_nbytes=step.kept_nbytes.get(index, 0),
                working_nbytes=working.get(index, 0),
                kind=_kind_of(layers[index].module),
            )
        )
    return tuple(described)


def _kind_of(module: nn.Module) -> str:
    """Return the name of the torch.nn class whose `forward` the module uses.

    If the module has another `forward`, returns the name of the module's class.
    """
    forward = type(module).forward
    alike = (one for one in type(module).__mro__ if getattr(one, "forward", None) is forward)
    of_torch = (one.__name__ for one in alike if one.__module__.startswith("torch.nn."))
    return next(of_torch, type(module).__name__)


def _working(layers: Sequence[LayerModule], step: _Step, backward: _Laps) -> dict[int, int]:
    """Return each layer's peak of live tensor bytes, without kept tensors and gradients.

    The peak is the larger of the peaks in the layer's forward and backward segments. From it are
    subtracted the kept tensors of this layer and of layers whose backward comes later, and the
    gradients of this layer and of layers whose backward came earlier.
    """
    working: dict[int, int] = {}
    held, gradients = sum(step.kept_nbytes.values()), 0
    for index, laps in backward.items():
        peak = max(lap.peak for lap in (step.forward.get(index, _NOTHING), *laps))
        gradients += sum(p.numel() * p.element_size() for _, p in layers[index].parameters)
        working[index] = max(0, peak - held - gradients)
        held -= step.kept_nbytes.get(index, 0)
    return working


class CostCounter(TorchDispatchMode):
    """A context in which the FLOPs, bytes and calls of all operations except views are counted."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.activations, self.alive = SegmentActivations(), LiveMemory()
        self._counted = Cost()

    def lap(self) -> Lap:
        """Return the cost and the peak memory since the previous call of `lap`."""
        counted, self._counted = self._counted, Cost()
        return Lap(counted, self.alive.lap())

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        inputs = list(tensors_in((args, kwargs)))
        out = func(*args, **kwargs)
        outputs = list(tensors_in(out))
        changes = func._schema.is_mutable and torch.Tag.inplace_view not in func.tags
        storages = {storage_of(tensor) for tensor in inputs} - {None}
        is_alias = bool(outputs) and all(storage_of(tensor) in storages for tensor in outputs)
        self.activations.read(inputs)
        if is_alias and not changes:  # a view
            return out
        flops = float(flops_of(func, args, kwargs, out))
        nbytes = float(nbytes_of(func, inputs, outputs))
        self._counted += Cost(flops, nbytes, int(not allocates(func)))
        self.activations.made(outputs)
        self.alive.made(outputs, inputs)
        # In real training, a sum of gradients takes no memory, because autograd adds in place.
        in_place = func is torch.ops.aten.add.Tensor and torch._C._current_graph_task_id() >= 0
        if not in_place:
            self.alive.update_peak(workspace_nbytes(func, args))
        return out
