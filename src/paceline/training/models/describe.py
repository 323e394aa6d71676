"""Describe a model as a `Workload` by tracing one training step without data.

The step runs on a copy of the model on PyTorch's meta device, where tensors have shapes but no
values, so nothing large is allocated or computed. If this step fails, as for a forward pass that
depends on values (`if x.sum() > 0`), the step runs on a copy on the model's own device. A model
with recurrent layers runs on the CPU, because PyTorch's meta device decomposes recurrent layers
into time steps, and keeps other tensors for backward than the CPU's kernel keeps.

The passes are divided into segments, one for each layer. A forward segment begins when the layer's
module is entered for the first time. Operations before the first layer belong to the first layer. A
backward segment ends when the layer's last gradient has been accumulated.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from paceline.core.error_lines import blamed
from paceline.core.errors import InvalidInput
from paceline.core.workload import Cost, Layer, Parameter, Workload
from paceline.links.devices import random_numbers_restored
from paceline.training.data.batch import call
from paceline.training.models.flops import allocates, flops_of, nbytes_of, tensors_in
from paceline.training.models.fused_attention import attention_as_on_cpu
from paceline.training.models.layers import LayerModule, copied, duplicate, layers_of
from paceline.training.models.live_memory import (
    LiveMemory,
    SegmentActivations,
    storage_of,
    workspace_nbytes,
)

Counts = tuple[int, int, int]  # arithmetic operations, bytes, calls except allocations


@dataclass
class _Step:
    """The records of one training step; layers are indices into `layers_of(model)`.

    `entered`: layers in the order of entry. Four lists have an item for each forward segment, in
    the same order: `segment_ends`, `activation_nbytes`, `forward_peaks` (of live bytes) and `kept`.

    `ready`: the (layer, parameter) pairs with a gradient, in the order of each pair's last
    gradient. `layer_ends`: the counts at each layer's last gradient, in the order of these
    gradients. `laps`: a (layer, peak) pair for each gradient; the peak is that of the live bytes
    since the previous gradient. A final pair (None, peak) covers the rest of the backward pass.
    """

    entered: list[int] = field(default_factory=list)
    segment_ends: list[Counts] = field(default_factory=list)
    activation_nbytes: list[int] = field(default_factory=list)
    forward_peaks: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    ready: dict[tuple[int, int], None] = field(default_factory=dict)
    layer_ends: dict[int, Counts] = field(default_factory=dict)
    laps: list[tuple[int | None, int]] = field(default_factory=list)
    backward_end: Counts = (0, 0, 0)


def describe(model: nn.Module, example_batch: Any, name: str | None = None) -> Workload:
    """Trace a training step of `model` on a batch; return its costs as a `Workload`.

    `example_batch`: a tensor, a sequence of positional arguments, or a mapping of keyword
    arguments. The first dimension of the first tensor is the batch size. The model keeps its mode
    (training or evaluation). The backward pass starts from all outputs that require a gradient,
    each with a gradient of ones.

    Costs are those of the whole batch. `activation_nbytes`: bytes of tensors that the layer's
    forward segment makes, and that later segments or the caller read. `kept_nbytes`: bytes of
    tensors that the forward segment makes, and that backward reads. `working_nbytes`: the layer's
    peak of live bytes, without kept tensors and without gradients of parameters. Layers without
    gradients are last in `backward_order`. A layer has no forward cost if no module calls the
    layer, for example because the parent module uses the layer's parameters directly.

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
    order = list(step.entered)
    for index in range(len(layers)):
        if index not in step.entered:  # insert the layer after the layer registered before
            order.insert(order.index(index - 1) + 1 if index else 0, index)
    never = [index for index in reversed(order) if index not in step.layer_ends]
    return Workload(
        name=label,
        batch_size=batch[0].shape[0],
        layers=_describe_layers(layers, order, step),
        backward_order=tuple(order.index(index) for index in (*step.layer_ends, *never)),
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
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tree_leaves(batch))
        problem = f"cannot run a training step on a batch of shape {shapes}: {blamed(error)}"
        raise InvalidInput(label, problem) from error
    finally:
        random.setstate(state)


def _run(model: nn.Module, batch: Any) -> _Step:
    """Record a forward and a backward pass; the hooks stay on `model`."""
    step, activations, alive = _Step(), SegmentActivations(), LiveMemory()
    forward, backward = CostCounter(activations, alive), CostCounter(activations, alive)

    def end_segment() -> None:
        step.segment_ends.append(forward.counts)
        step.forward_peaks.append(alive.lap())

    def enter(index: int) -> None:
        if index in step.entered:
            return
        if step.entered:
            end_segment()
            activations.segment += 1
        step.entered.append(index)

    def accumulated(key: tuple[int, int]) -> None:
        # Move the entries to the end: if a parameter gets several gradients, the last one counts.
        step.ready.pop(key, None)
        step.layer_ends.pop(key[0], None)
        step.ready[key], step.layer_ends[key[0]] = None, backward.counts
        step.laps.append((key[0], alive.lap()))

    for index, layer in enumerate(layers_of(model)):
        layer.module.register_forward_pre_hook(lambda *_, i=index: enter(i), prepend=True)
        for number, (_, parameter) in enumerate(layer.parameters):
            key = (index, number)
            parameter.register_post_accumulate_grad_hook(lambda _, key=key: accumulated(key))
    with forward:
        outputs = list(tensors_in(call(model, batch)))
    end_segment()
    activations.read(outputs, outside=True)
    segments = range(len(step.segment_ends))
    step.activation_nbytes = [activations.nbytes(i) for i in segments]
    activations.in_backward = True
    trained = [output for output in outputs if output.requires_grad]
    if not trained:
        raise InvalidInput("model", "has no output that depends on a trainable parameter")
    gradients = [torch.ones_like(output) for output in trained]
    alive.made(gradients)
    alive.lap()
    with backward:
        torch.autograd.backward(trained, gradients)
    step.backward_end = backward.counts
    step.laps.append((None, alive.lap()))
    step.kept = [activations.kept_nbytes(i) for i in segments]
    return step


def _describe_layers(
    layers: Sequence[LayerModule], order: list[int], step: _Step
) -> tuple[Layer, ...]:
    # If no layer was entered, all forward operations belong to the first layer.
    entered = step.entered or order[:1]
    forward = dict(zip(entered, _differences(step.segment_ends), strict=True))
    activation_nbytes = dict(zip(entered, step.activation_nbytes, strict=True))
    kept = dict(zip(entered, step.kept, strict=True))
    working = _working(layers, kept, step)
    # Work after the last gradient belongs to the layer whose backward ends last.
    until = [*list(step.layer_ends.values())[:-1], step.backward_end]
    backward = dict(zip(step.layer_ends, _differences(until), strict=True))
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
                activation_nbytes=activation_nbytes.get(index, before),
                forward=forward.get(index, Cost()),
                backward=backward.get(index, Cost()),
                kept_nbytes=kept.get(index, 0),
                working_nbytes=working.get(index, 0),
                kind=_kind_of(layers[index].module),
            )
        )
    return tuple(described)


def _kind_of(module: nn.Module) -> str:
    """Return the name of the torch.nn class whose forward the module uses.

    If the module defines its own forward, return the name of its own class.
    """
    forward = type(module).forward
    alike = (one for one in type(module).__mro__ if getattr(one, "forward", None) is forward)
    of_torch = (one.__name__ for one in alike if one.__module__.startswith("torch.nn."))
    return next(of_torch, type(module).__name__)


def _working(layers: Sequence[LayerModule], kept: Mapping[int, int], step: _Step) -> dict[int, int]:
    """Return each layer's peak of live bytes, minus the bytes of kept tensors and gradients.

    The peak is the larger of the peaks in the layer's forward and backward segments. Kept tensors
    are those of this layer and of layers whose backward comes later. Gradients are those of this
    layer and of layers whose backward came earlier.
    """
    in_forward = dict(zip(step.entered, step.forward_peaks, strict=False))
    ends = list(step.layer_ends)
    last = {index: number for number, (index, _) in enumerate(step.laps) if index is not None}
    # A backward segment ends with its layer's last gradient; the last segment ends with the pass.
    stops = [*(last[index] + 1 for index in ends[:-1]), len(step.laps)]
    working: dict[int, int] = {}
    held, gradients = sum(kept.values()), 0
    for index, start, stop in zip(ends, [0, *stops], stops, strict=False):
        peak = max(nbytes for _, nbytes in step.laps[start:stop])
        peak = max(peak, in_forward.get(index, 0))
        gradients += sum(p.numel() * p.element_size() for _, p in layers[index].parameters)
        working[index] = max(0, peak - held - gradients)
        held -= kept.get(index, 0)
    return working


def _differences(ends: Sequence[Counts]) -> list[Cost]:
    starts = ((0, 0, 0), *ends)
    return [
        Cost(float(end[0] - start[0]), float(end[1] - start[1]), end[2] - start[2])
        for start, end in zip(starts, ends, strict=False)
    ]


class CostCounter(TorchDispatchMode):
    """Within the context, counts the FLOPs, bytes and calls of all operations except views."""

    def __init__(
        self, activations: SegmentActivations | None = None, alive: LiveMemory | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counts = (0, 0, 0)
        self._activations = activations or SegmentActivations()
        self._alive = alive or LiveMemory()

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
        self._activations.read(inputs)
        if is_alias and not changes:  # a view
            return out
        flops, nbytes, num_calls = self.counts
        flops += flops_of(func, args, kwargs, out)
        nbytes += nbytes_of(func, inputs, outputs)
        self.counts = (flops, nbytes, num_calls + (not allocates(func)))
        self._activations.made(outputs)
        self._alive.made(outputs, inputs)
        # Without a dispatch mode, autograd would add gradients in place, and allocate no sum.
        in_place = func is torch.ops.aten.add.Tensor and torch._C._current_graph_task_id() >= 0
        if not in_place:
            self._alive.update_peak(workspace_nbytes(func, args))
        return out
