"""A body worker's half of the model: what it computes, and what it must have in common."""

import json

import torch
from torch import Tensor, nn

from paceline.core.errors import InvalidInput
from paceline.data.dataset import Dataset
from paceline.models import find
from paceline.models.layers import LayerModule, layers_of
from paceline.record.clock import clock_for
from paceline.record.marks import LayerMarks
from paceline.strategies.wheel import flat
from paceline.strategies.wheel.coding import (
    Coder,
    Parts,
    buffer_of,
    codecs_of,
    parts_of,
    values_of,
)
from paceline.strategies.wheel.halves import Halves, cut
from paceline.strategies.wheel.job import Job
from paceline.strategies.wheel.paced import PacedWhole, stand_in
from paceline.strategies.wheel.port import Port
from paceline.strategies.wheel.split import Purpose
from paceline.strategies.wheel.trace import Trace
from paceline.wire.messages import Message

_EXAMPLES = 2


def layers_in(model: nn.Module, names: tuple[str, ...]) -> tuple[LayerModule, ...]:
    """Return the layers of the model whose parameters have these names."""
    layers = model.layers if isinstance(model, PacedWhole) else layers_of(model)
    return tuple(layer for layer in layers if layer.parameters[0][0] in names)


def halves_for(job: Job, data: Dataset) -> tuple[nn.Module, Halves]:
    """Return a job's model and its halves, or what stands in for them in a rehearsal.

    InvalidInput if the model cannot be cut.
    """
    if job.pace is not None:
        return stand_in(job.model, job.first, job.pace)
    torch.manual_seed(job.seed)
    model = find(job.model).build(job.num_classes).train()
    return model, cut(model, example_of(data), job.first)


def coders_of(job: Job, dtype: torch.dtype) -> dict[Purpose, Coder]:
    """Return new coders of all that travels by a codec, for one worker."""
    found = codecs_of(job.config)
    return {purpose: Coder(purpose, codec, dtype) for purpose, codec in found.items()}


def example_of(data: Dataset) -> Tensor:
    """Return the samples with which a model is cut."""
    inputs, _ = data.train.__getitems__(range(min(_EXAMPLES, len(data.train))))
    return inputs


def layout_of(job: Job, halves: Halves, data: Dataset) -> str:
    """Return what body and hub must have in common to train one model, as JSON."""
    in_body = zip(halves.body_names, halves.body_parameters, strict=True)
    in_head = zip(halves.head_names, halves.head_parameters, strict=True)
    return json.dumps(
        {
            "settings": job.model_dump(mode="json", exclude={"boot_id"}),
            "body": {name: f"{p.dtype} {list(p.shape)}" for name, p in in_body},
            "head": {name: f"{p.dtype} {list(p.shape)}" for name, p in in_head},
            "activations": list(halves.crossing),
            "samples": [len(data.train), *data.sample_shape],
        }
    )


def difference(here: str, there: str) -> str | None:
    """Return where two layouts differ first, or None. InvalidInput if the other one is none."""
    try:
        own, other = json.loads(here), dict(json.loads(there))
    except (ValueError, TypeError):
        raise InvalidInput("what it says of its run cannot be read") from None
    for part, value in own.items():
        found = other.get(part)
        if isinstance(value, dict) and isinstance(found, dict):
            for name in value | found:
                if value.get(name) != found.get(name):
                    return f"{part}, {name}: {found.get(name)} and not {value.get(name)}"
        elif value != found:
            return f"{part}: {found} and not {value}"
    return None


class BodyHalf:
    """The body of one worker on its device, which plans call `name`.

    InvalidInput if the model cannot be cut, or a codec cannot carry its values.
    """

    def __init__(
        self, job: Job, worker: int, device: torch.device, name: str, data: Dataset
    ) -> None:
        model, halves = halves_for(job, data)
        self.body, self.device, self.name = halves.body.to(device), device, name
        self.layout = layout_of(job, halves, data)
        self._names, self._parameters = halves.body_names, halves.body_parameters
        clock = clock_for(device)
        self.layers = layers_in(model, halves.body_names)
        trace = Trace(worker, name, LayerMarks(self.layers, clock), clock, job.traced)
        self.trace = trace
        self.port = Port(coders_of(job, self._parameters[0].dtype), trace, device)

    @property
    def num_values(self) -> int:
        """The body's parameters."""
        return sum(parameter.numel() for parameter in self._parameters)

    @property
    def nbytes(self) -> int:
        """Bytes of the body's parameters."""
        return self.num_values * self._parameters[0].element_size()

    def buffers(self) -> memoryview | None:
        """Return the body's state that no gradient changes, such as running means; None: none."""
        found = buffers_of(self.body)
        return found if found.nbytes else None

    def take_parameters(self, step: int, reply: Message) -> None:
        """Have the parameters be those of a reply, in its own memory where that can be."""
        purpose = Purpose.BODY_PARAMETERS
        entered = self.port.enter(step, purpose, parts_of(reply))
        values = self.port.decode(step, purpose, reply.codec, entered, self.num_values)
        parts = flat.views(values, self._parameters)
        for parameter, part in zip(self._parameters, parts, strict=True):
            parameter.data = part

    def activations(self, step: int, outputs: Tensor) -> Parts:
        """Return the activations as they travel."""
        return self.port.leave(step, Purpose.ACTIVATIONS, outputs)

    def gradients(self, step: int) -> Parts:
        """Return the body's gradients as they travel, and leave the parameters none."""
        gradients = flat.flatten(flat.take_gradients(self._names, self._parameters))
        return self.port.leave(step, Purpose.BODY_GRADIENTS, gradients)

    def take_residuals(self, step: int, reply: Message) -> tuple[Tensor, ...]:
        """Have the residuals of a reply on the device, still encoded."""
        return self.port.enter(step, Purpose.RESIDUALS, parts_of(reply))

    def residuals(self, step: int, codec: str, entered: tuple[Tensor, ...], like: Tensor) -> Tensor:
        """Return residuals that were taken: the gradient of the loss by the activations."""
        values = self.port.decode(step, Purpose.RESIDUALS, codec, entered, like.numel())
        return values.view(like.shape)

    def forget(self) -> None:
        """Drop what a step has left half done."""
        for parameter in self._parameters:
            parameter.grad = None


def buffers_of(half: nn.Module) -> memoryview:
    """Return the values of all buffers of a half, one after the other."""
    found = [buffer.detach().cpu().contiguous() for buffer in half.buffers()]
    if not found:
        return memoryview(b"")
    return buffer_of(torch.cat([one.reshape(-1).view(torch.uint8) for one in found]))


@torch.no_grad()
def load_buffers(half: nn.Module, part: memoryview) -> None:
    """Give a half's buffers the values that `buffers_of` returned; InvalidInput if not as many."""
    buffers = list(half.buffers())
    sizes = [buffer.numel() * buffer.element_size() for buffer in buffers]
    values = values_of(part, torch.uint8, sum(sizes))
    parts = values.split(sizes) if sizes else ()
    for buffer, own in zip(buffers, parts, strict=True):
        buffer.copy_(own.clone().view(buffer.dtype).view(buffer.shape))
