"""Where a model is cut into body and head, and the bytes that cross the cut (Du et al. 2017, 3.1).

    body worker                                   hub
    body    -- labels, activations ------------>  head
    body    <------------------- residuals -----  head  -- head gradients -->  server
    body    -- body gradients ---------------------------------------------->  server
    body    <------------------------------ body parameters -----------------  server

The head's parameters and gradients never leave the hub.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from paceline.core.errors import InvalidInput
from paceline.core.wire_format import WireFormat, wire_format
from paceline.core.workload import Layer, Workload
from paceline.strategies.wheel.config import Wheel

LABEL_NBYTES = 4  # a class travels as a 32-bit integer


class Purpose(StrEnum):
    """What is communicated in a step: the seven of figure 2."""

    LABELS = "labels"
    ACTIVATIONS = "activations"
    RESIDUALS = "residuals"
    BODY_PARAMETERS = "body-parameters"
    BODY_GRADIENTS = "body-gradients"
    HEAD_PARAMETERS = "head-parameters"
    HEAD_GRADIENTS = "head-gradients"


TO_HUB = (Purpose.LABELS, Purpose.ACTIVATIONS, Purpose.BODY_GRADIENTS)
FROM_HUB = (Purpose.RESIDUALS, Purpose.BODY_PARAMETERS)


@dataclass(frozen=True, slots=True)
class Message:
    """Values of one purpose, their bytes as they travel, and what encodes them, if anything."""

    num_values: int
    nbytes: int
    wire_format: WireFormat | None


@dataclass(frozen=True, slots=True)
class Split:
    """The two halves of a model: what the head takes in is what the body's last layer hands on."""

    body: Workload
    head: Workload

    @classmethod
    def before(cls, workload: Workload, first: int) -> "Split":
        """Return the halves of which the head begins with the layer of that index."""
        layers, order = workload.layers, workload.backward_order
        handed_on = layers[first - 1].activation_nbytes
        samples = workload.batch_size
        in_body = tuple(i for i in order if i < first)
        in_head = tuple(i - first for i in order if i >= first)
        return cls(
            Workload(workload.name, samples, layers[:first], in_body, workload.input_nbytes),
            Workload(workload.name, samples, layers[first:], in_head, handed_on),
        )

    @property
    def crossing_nbytes(self) -> int:
        """Bytes of the activations, and of the residuals, as they are."""
        return self.head.input_nbytes


def split(workload: Workload, config: Wheel) -> Split:
    """Return body and head as `config.head` names them, or cut where the fewest bytes travel.

    Without a name the head is fully-connected layers, at the model's end. InvalidInput if there are
    none, or if data parallelism would send no more bytes than the best of these cuts, or if no
    layer has that name, or only the first.
    """
    if config.head is not None:
        return Split.before(workload, _index_of(workload, config.head))
    cuts = [Split.before(workload, first) for first in _candidates(workload)]
    if not cuts:
        raise InvalidInput(_nothing_connected(workload))
    best = min(cuts, key=lambda cut: on_the_wire(messages(cut, config)))
    if on_the_wire(messages(best, config)) >= _in_data_parallelism(messages(best, config)):
        raise InvalidInput(_not_worth_it(best))
    return best


def messages(parts: Split, config: Wheel) -> dict[Purpose, Message]:
    """Return what one worker's step communicates, by purpose: Table 1's formula.

    What is encoded is encoded as one vector. InvalidInput for a codec whose bytes depend on the
    values.
    """
    body, head = parts.body, parts.head
    sizes = [p.element_size for layer in head.layers for p in layer.parameters]
    crossing = parts.crossing_nbytes // (sizes[0] if sizes else 4)
    labels = Message(body.batch_size, LABEL_NBYTES * body.batch_size, None)
    within_hub = Message(head.num_parameters, head.gradient_nbytes, None)

    def message(codec: str | None, count: int, nbytes: int) -> Message:
        if codec is None:
            return Message(count, nbytes, None)
        known = wire_format(codec)
        return Message(count, known.nbytes(count), known)

    return {
        Purpose.LABELS: labels,
        Purpose.ACTIVATIONS: message(config.activations, crossing, parts.crossing_nbytes),
        Purpose.RESIDUALS: message(config.residuals, crossing, parts.crossing_nbytes),
        Purpose.BODY_PARAMETERS: message(
            config.parameters, body.num_parameters, body.gradient_nbytes
        ),
        Purpose.BODY_GRADIENTS: message(
            config.gradients, body.num_parameters, body.gradient_nbytes
        ),
        Purpose.HEAD_PARAMETERS: within_hub,
        Purpose.HEAD_GRADIENTS: within_hub,
    }


def on_the_wire(sent: Mapping[Purpose, Message]) -> int:
    """Return the bytes that one worker's step sends to the hub and gets from it."""
    return sum(sent[purpose].nbytes for purpose in (*TO_HUB, *FROM_HUB))


def _in_data_parallelism(sent: Mapping[Purpose, Message]) -> int:
    """Return the bytes if the head were at the worker, too: its gradients would travel instead."""
    crossing = sent[Purpose.ACTIVATIONS].nbytes + sent[Purpose.RESIDUALS].nbytes
    within_hub = sent[Purpose.HEAD_PARAMETERS].nbytes + sent[Purpose.HEAD_GRADIENTS].nbytes
    return on_the_wire(sent) - crossing + within_hub


def _index_of(workload: Workload, name: str) -> int:
    names = [layer.name for layer in workload.layers]
    if name not in names[1:]:
        why = "leaves nothing for the body" if name in names else "is no layer"
        raise InvalidInput(
            f"head: {name!r} {why} of model {workload.name}; choose one of "
            f"{', '.join(names[1:]) or 'another model, as this one has a single layer'}"
        )
    return names.index(name)


def _candidates(workload: Workload) -> Iterator[int]:
    """Yield where a head may begin: at a matrix after which nothing has more dimensions."""
    for first in range(len(workload.layers) - 1, 0, -1):
        dimensions = _dimensions(workload.layers[first])
        if dimensions > 2:
            return
        if dimensions == 2:
            yield first


def _dimensions(layer: Layer) -> int:
    return max((len(parameter.shape) for parameter in layer.parameters), default=0)


def _nothing_connected(workload: Workload) -> str:
    layers = workload.layers
    if len(layers) == 1:
        return f"wheel: model {workload.name} has a single layer, {layers[0].name}, to split"
    last = max(range(len(layers)), key=lambda i: (_dimensions(layers[i]) > 2, i))
    shapes = ", ".join("x".join(map(str, p.shape)) for p in layers[last].parameters)
    return (
        f"wheel: model {workload.name} has no head to split off: no fully-connected layer follows "
        f"{layers[last].name} ({shapes}); choose a data-parallel strategy, or name by head the "
        "layer with which the head begins"
    )


def _not_worth_it(best: Split) -> str:
    crossing, kept = 2 * best.crossing_nbytes, 2 * best.head.gradient_nbytes
    return (
        f"wheel: model {best.body.name} has no head worth splitting off: the best begins with "
        f"{best.head.layers[0].name}, before which activations and residuals of "
        f"{best.body.batch_size} samples are {crossing / 1e6:.3g} MB, but its parameters and "
        f"gradients only {kept / 1e6:.3g} MB; choose a data-parallel strategy, or a smaller batch"
    )
