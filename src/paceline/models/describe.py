"""`describe`: a model as a `Workload`, found by tracing one training step without its data.

The step runs on a copy of the model whose tensors are on PyTorch's meta device: they have shapes
and no values, so nothing large is allocated or computed, and the user's model is not touched. A
model that looks at values (`if x.sum() > 0`) cannot run so; it is copied with its values and run
for real.

A segment of the forward pass begins when a layer's module is entered for the first time. What runs
before the first layer belongs to that layer. A segment of the backward pass ends when the last
gradient of a layer has been accumulated.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from paceline.core.errors import InvalidInput
from paceline.core.workload import Cost, Layer, Parameter, Workload
from paceline.models.alive import Alive
from paceline.models.duplicate import duplicate
from paceline.models.flops import tensors_in
from paceline.models.layers import LayerModule, layers_of
from paceline.models.trace import CostCounter, Counts, HandOver

_Batch = tuple[Tensor, ...]


@dataclass
class _Step:
    """What one step showed. Layers are indices into `layers_of`; segments are numbered by entry.

    `ready` maps (layer, parameter) to the counts at its last gradient, in the order of those.
    `laps` pairs the layer of each gradient, as they come, with the most bytes that were alive since
    the one before it; the last lap is that from the last gradient to the end.
    """

    entered: list[int] = field(default_factory=list)
    segment_ends: list[Counts] = field(default_factory=list)
    handed_on: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    ready: dict[tuple[int, int], Counts] = field(default_factory=dict)
    laps: list[tuple[int | None, int]] = field(default_factory=list)
    backward_end: Counts = (0, 0, 0)


def describe(model: nn.Module, example_batch: Tensor | _Batch, name: str | None = None) -> Workload:
    """Trace one training step of `model` on a batch like `example_batch` and say what it costs.

    The first dimension of the first tensor of `example_batch` is the batch size; the model is
    called with the tensors as positional arguments, in the mode (training or evaluation) in which
    it is. The backward pass starts from all floating-point outputs, each with a gradient of ones.
    Costs are those of the whole batch. `activation_nbytes` counts what is made in a layer's
    forward segment and read after it: between two layers of a chain, the tensor handed on;
    `kept_nbytes`, what is made there and read in the backward pass; `working_nbytes`, what is alive
    in the layer's backward segment beside that, and beside the gradients of parameters.
    Layers whose gradients never come stand last in `backward_order`; a layer whose module is never
    entered (its parent uses its parameters) has no forward cost of its own.

    The model's parameters, buffers, gradients, hooks and mode stay as they are, and so do the
    random number generators of PyTorch and Python. Its forward hooks run as in any call.
    Raises InvalidInput if the model has nothing to train or cannot run on such a batch.
    """
    batch = example_batch if isinstance(example_batch, tuple) else (example_batch,)
    label = name or type(model).__name__
    _check_batch(batch, label)
    layers = layers_of(model)
    if not layers:
        raise InvalidInput(f"{label} has no trainable parameters")
    step = _trace(model, batch, label)
    order = _forward_order(len(layers), step.entered)
    return Workload(
        name=label,
        batch_size=batch[0].shape[0],
        layers=_describe_layers(layers, order, step),
        backward_order=_backward_order(order, step),
        input_nbytes=sum(tensor.numel() * tensor.element_size() for tensor in batch),
    )


def _check_batch(batch: tuple[object, ...], label: str) -> None:
    if not batch or not all(isinstance(tensor, Tensor) for tensor in batch):
        raise InvalidInput(f"{label}: an example batch is a tensor or a tuple of tensors")
    first = batch[0]
    assert isinstance(first, Tensor)
    if first.dim() == 0 or first.shape[0] == 0:
        raise InvalidInput(
            f"{label}: the example batch has shape {tuple(first.shape)}; its first dimension must "
            "be the number of samples, at least 1"
        )


def _trace(model: nn.Module, batch: _Batch, label: str) -> _Step:
    devices = {parameter.device for parameter in model.parameters()}
    with _generators_kept(devices), torch.inference_mode(False), torch.enable_grad():
        try:
            meta_batch = tuple(tensor.detach().to("meta") for tensor in batch)
            meta_model = duplicate(model, lambda tensor: torch.empty_like(tensor, device="meta"))
            with torch.device("meta"):
                return _run(meta_model, meta_batch)
        except InvalidInput:
            raise
        except Exception:  # noqa: S110 - whatever fails without values is tried with them
            pass
        try:
            real_batch = tuple(tensor.detach().clone() for tensor in batch)
            return _run(duplicate(model, torch.clone), real_batch)
        except InvalidInput:
            raise
        except Exception as error:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in batch)
            first_line = (str(error).strip().splitlines() or [""])[0]
            raise InvalidInput(
                f"{label} cannot run a training step on a batch of shape {shapes}: "
                f"{type(error).__name__}: {first_line}"
            ) from error


@contextmanager
def _generators_kept(devices: set[torch.device]) -> Iterator[None]:
    cuda = [device for device in devices if device.type == "cuda"]
    state = random.getstate()
    try:
        with torch.random.fork_rng(devices=cuda):
            yield
    finally:
        random.setstate(state)


def _run(model: nn.Module, batch: _Batch) -> _Step:
    """One forward and one backward pass of a model that may be used up."""
    step, hand_over, alive = _Step(), HandOver(), Alive()
    counter = CostCounter(hand_over, alive)

    def enter(index: int) -> None:
        if index in step.entered:
            return
        if step.entered:
            step.segment_ends.append(counter.counts)
            hand_over.segment += 1
        step.entered.append(index)

    layers = layers_of(model)
    for index, layer in enumerate(layers):
        layer.module.register_forward_pre_hook(lambda *_, i=index: enter(i), prepend=True)
    with counter:
        outputs = list(tensors_in(model(*batch)))
    step.segment_ends.append(counter.counts)
    hand_over.read(outputs, outside=True)
    step.handed_on = [hand_over.nbytes(i) for i in range(len(step.segment_ends))]
    hand_over.in_backward = True
    _run_backward(layers, outputs, step, CostCounter(hand_over, alive), alive)
    step.kept = [hand_over.kept_nbytes(i) for i in range(len(step.segment_ends))]
    return step


def _run_backward(
    layers: Sequence[LayerModule],
    outputs: list[Tensor],
    step: _Step,
    counter: CostCounter,
    alive: Alive,
) -> None:
    def accumulated(key: tuple[int, int]) -> None:
        step.ready.pop(key, None)  # moves it to the end: of several gradients the last one counts
        step.ready[key] = counter.counts
        step.laps.append((key[0], alive.lap()))

    for index, layer in enumerate(layers):
        for number, (_, parameter) in enumerate(layer.parameters):
            key = (index, number)
            parameter.register_post_accumulate_grad_hook(lambda _, key=key: accumulated(key))
    trained = [output for output in outputs if output.requires_grad]
    if not trained:
        raise InvalidInput("no output of the model depends on a trainable parameter")
    gradients = [torch.ones_like(output) for output in trained]
    alive.made(gradients)
    alive.lap()
    with counter:
        torch.autograd.backward(trained, gradients)
    step.backward_end = counter.counts
    step.laps.append((None, alive.lap()))


def _forward_order(num_layers: int, entered: list[int]) -> list[int]:
    """Order the layers as entered; one never entered follows the one registered before it."""
    order = list(entered)
    for index in range(num_layers):
        if index not in entered:
            order.insert(order.index(index - 1) + 1 if index else 0, index)
    return order


def _ends_of_layers(step: _Step) -> dict[int, Counts]:
    """Return the counts when the last gradient of each layer was ready, in the order of those."""
    ends: dict[int, Counts] = {}
    for (index, _), counts in step.ready.items():
        ends.pop(index, None)
        ends[index] = counts
    return ends


def _backward_order(order: list[int], step: _Step) -> tuple[int, ...]:
    ready = _ends_of_layers(step)
    never = [index for index in reversed(order) if index not in ready]
    return tuple(order.index(index) for index in (*ready, *never))


def _describe_layers(
    layers: Sequence[LayerModule], order: list[int], step: _Step
) -> tuple[Layer, ...]:
    # Without any entry, everything belongs to the first layer.
    entered = step.entered or order[:1]
    forward = dict(zip(entered, _differences(step.segment_ends), strict=True))
    handed_on = dict(zip(entered, step.handed_on, strict=True))
    kept = dict(zip(entered, step.kept, strict=True))
    working = _working(layers, kept, step)
    ends = _ends_of_layers(step)
    until = [*list(ends.values())[:-1], step.backward_end]
    backward = dict(zip(ends, _differences(until), strict=True))
    described: list[Layer] = []
    for index in order:
        before = described[-1].activation_nbytes if described else 0
        described.append(
            Layer(
                name=layers[index].name,
                parameters=_in_ready_order(layers[index], index, step),
                activation_nbytes=handed_on.get(index, before),
                forward=forward.get(index, Cost()),
                backward=backward.get(index, Cost()),
                kept_nbytes=kept.get(index, 0),
                working_nbytes=working.get(index, 0),
            )
        )
    return tuple(described)


def _working(layers: Sequence[LayerModule], kept: Mapping[int, int], step: _Step) -> dict[int, int]:
    """Return what is alive in each layer's backward but for what is kept and the gradients.

    Kept is what this layer and those keep whose backward comes later; gradients are those of this
    layer's parameters and of the layers before it.
    """
    working: dict[int, int] = {}
    held, gradients = sum(kept.values()), 0
    for index, peak in _peaks(step).items():
        gradients += sum(p.numel() * p.element_size() for _, p in layers[index].parameters)
        working[index] = max(0, peak - held - gradients)
        held -= kept.get(index, 0)
    return working


def _peaks(step: _Step) -> dict[int, int]:
    """Return the most bytes alive in each layer's backward segment, in the order of those."""
    ends = list(_ends_of_layers(step))
    last = {index: number for number, (index, _) in enumerate(step.laps) if index is not None}
    stops = [*(last[index] + 1 for index in ends[:-1]), len(step.laps)]
    parts = zip([0, *stops], stops, strict=False)
    peaks = [max(nbytes for _, nbytes in step.laps[start:stop]) for start, stop in parts]
    return dict(zip(ends, peaks, strict=True))


def _in_ready_order(layer: LayerModule, index: int, step: _Step) -> tuple[Parameter, ...]:
    numbers = [number for (of, number) in step.ready if of == index]
    numbers += [number for number in range(len(layer.parameters)) if number not in numbers]
    own = [layer.parameters[number] for number in numbers]
    return tuple(Parameter(name, tuple(p.shape), p.element_size()) for name, p in own)


def _differences(ends: Sequence[Counts]) -> list[Cost]:
    starts = ((0, 0, 0), *ends)
    return [
        Cost(float(end[0] - start[0]), float(end[1] - start[1]), end[2] - start[2])
        for start, end in zip(starts, ends, strict=False)
    ]
