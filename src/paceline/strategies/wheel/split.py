"""Split a workload into body and head, and count the bytes between them (Du et al. 2017, 3.1).

    body worker                                   hub
    body    -- labels, activations ------------>  head
    body    <-------- activation gradients -----  head  -- head gradients -->  server
    body    -- body gradients ---------------------------------------------->  server
    body    <------------------------------ body parameters -----------------  server

The head's parameters and gradients never leave the hub.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from paceline.core.cost import LayerTimes, Rate
from paceline.core.cutting import LOSS, refusal_of
from paceline.core.errors import InvalidInput
from paceline.core.wire_format import Purpose, WireFormat, wire_format
from paceline.core.workload import Layer, Workload
from paceline.strategies.wheel.config import PaceSpec, Wheel

LABEL_NBYTES = 4  # a class travels as a 32-bit integer
_MATRIX = 2  # dimensions
_NO_PRODUCT, _SEVERAL = 0.5, 2  # of a matrix with a sample, between the counts of none, one and two
TO_HUB = (Purpose.LABELS, Purpose.ACTIVATIONS, Purpose.GRADIENTS)
FROM_HUB = (Purpose.ACTIVATION_GRADIENTS, Purpose.PARAMETERS)


class MessageSize(NamedTuple):
    """Values of one purpose, their bytes as they travel, and what encodes them, if anything."""

    num_values: int
    nbytes: int
    wire_format: WireFormat | None


class Split(NamedTuple):
    """The two halves of a model; the head's inputs are the activations that the body hands on."""

    body: Workload
    head: Workload

    @property
    def first(self) -> str:
        """The name of the head's first layer, or "loss"."""
        return self.head.layers[0].name if self.head.layers else LOSS

    @classmethod
    def before(cls, workload: Workload, first: int) -> "Split":
        """Return the halves of which the head begins with the layer of that index.

        Behind the last layer there is the loss alone.
        """
        layers, order = workload.layers, workload.backward_order
        handed_on = layers[first - 1].activation_nbytes
        samples = workload.batch_size
        in_body = tuple(i for i in order if i < first)
        in_head = tuple(i - first for i in order if i >= first)
        targets = workload.target_nbytes
        return cls(
            Workload(
                *(workload.name, samples, layers[:first], in_body, workload.input_nbytes),
                target_nbytes=targets,
            ),
            Workload(
                *(workload.name, samples, layers[first:], in_head, handed_on), target_nbytes=targets
            ),
        )

    def resized(self, num_samples: int) -> "Split":
        """Return halves of another batch, as far as messages depend on its size."""
        old, targets = self.body.batch_size, self.body.target_nbytes
        sizes: dict[str, Any] = {
            "batch_size": num_samples,
            "target_nbytes": None if targets is None else targets // old * num_samples,
        }
        crossing = self.head.input_nbytes // old * num_samples
        return Split(
            replace(self.body, **sizes), replace(self.head, **sizes, input_nbytes=crossing)
        )


def split(workload: Workload, config: Wheel) -> Split:
    """Return body and head as `config.head` names them, or cut where the fewest bytes travel.

    Without a name the head is fully-connected layers, at the model's end; of a model that has such
    layers at each of several places of a sample, such as a transformer's tokens, the last one
    alone. Cuts that were tried and refused (`workload.refused_cuts`) are left out. Where there are
    none, or data parallelism would send no more bytes than the best of them, the head is the loss
    alone, and that is what training is: asynchronous data parallelism (section 3.4.4).
    InvalidInput if no layer has that name, or only the first; or if the model's outputs, which
    cross then, are more bytes than its parameters.
    """
    if config.head is not None:
        return Split.before(workload, _index_of(workload, config.head))
    cuts = [Split.before(workload, first) for first in _possible(workload)]
    best = min(cuts, key=lambda cut: on_the_wire(messages(cut, config)), default=None)
    if best is not None and _saves(best, config):
        return best
    whole = Split.before(workload, len(workload.layers))
    # Gradients and parameters cross as well, and are what data parallelism would send.
    if refusal_of(workload, LOSS) is None and whole.head.input_nbytes < workload.gradient_nbytes:
        return whole
    if best is not None:
        raise InvalidInput.of(_not_worth(best))
    if workload.refused_cuts:
        raise InvalidInput.of(workload.refused_cuts[0][1])
    raise InvalidInput.of(_nothing_connected(workload))


def _index_of(workload: Workload, head: str) -> int:
    """Return the index of the layer with which the head begins."""
    names = [layer.name for layer in workload.layers]
    if head == LOSS and LOSS not in names:
        return len(names)
    if head not in names[1:]:
        why = "leaves nothing for the body" if head in names else "is no layer"
        others = ", ".join(names[1:]) or "another model, as this one has a single layer"
        raise InvalidInput(
            "head", f"{head!r} {why} of model {workload.name}", hint=f"choose one of {others}"
        )
    if refusal := refusal_of(workload, head):
        raise InvalidInput.of(refusal)
    return names.index(head)


def _saves(parts: Split, config: Wheel) -> bool:
    """Return True if less crosses the cut than of a head at the worker, whose gradients would."""
    sent = messages(parts, config)
    crossing = sent[Purpose.ACTIVATIONS].nbytes + sent[Purpose.ACTIVATION_GRADIENTS].nbytes
    return crossing < sent[Purpose.HEAD_PARAMETERS].nbytes + sent[Purpose.HEAD_GRADIENTS].nbytes


def _not_worth(best: Split) -> str:
    crossing, kept = 2 * best.head.input_nbytes, 2 * best.head.gradient_nbytes
    return (
        f"wheel: model {best.body.name} has no head worth splitting off: the best begins with "
        f"{best.first}, before which activations and activation gradients of "
        f"{best.body.batch_size} samples are {crossing / 1e6:.3g} MB, but its parameters and "
        f"gradients only {kept / 1e6:.3g} MB; choose a data-parallel strategy, or a smaller "
        "batch, or name by head where to cut all the same"
    )


def messages(parts: Split, config: Wheel) -> dict[Purpose, MessageSize]:
    """Return the messages of one worker's step, by purpose: Table 1's formula.

    What is encoded is encoded as one vector. InvalidInput for a codec whose bytes depend on the
    values.
    """
    body, head = parts.body, parts.head
    sizes = [p.element_size for layer in (*head.layers, *body.layers) for p in layer.parameters]
    crossing = (parts.head.input_nbytes // (sizes[0] if sizes else 4), parts.head.input_nbytes)
    in_body = (body.num_parameters, body.gradient_nbytes)
    in_head = (head.num_parameters, head.gradient_nbytes)
    targets = body.target_nbytes
    values = {
        Purpose.LABELS: (
            body.batch_size,
            LABEL_NBYTES * body.batch_size if targets is None else targets,
        ),
        Purpose.ACTIVATIONS: crossing,
        Purpose.ACTIVATION_GRADIENTS: crossing,
        Purpose.PARAMETERS: in_body,
        Purpose.GRADIENTS: in_body,
        Purpose.HEAD_PARAMETERS: in_head,
        Purpose.HEAD_GRADIENTS: in_head,
    }
    sent = {purpose: MessageSize(*own, None) for purpose, own in values.items()}
    for purpose, codec in config.codecs.items():
        known, num_values = wire_format(codec), sent[purpose].num_values
        sent[purpose] = MessageSize(num_values, known.nbytes(num_values), known)
    return sent


def label_share(parts: Split, config: Wheel) -> float:
    """Return the share of the labels in the message that they travel in with activations."""
    sent = messages(parts, config)
    labels = sent[Purpose.LABELS].nbytes
    return labels / (labels + sent[Purpose.ACTIVATIONS].nbytes)


def on_the_wire(sent: Mapping[Purpose, MessageSize]) -> int:
    """Return the bytes that one worker's step sends to the hub and gets from it."""
    return sum(sent[purpose].nbytes for purpose in (*TO_HUB, *FROM_HUB))


def pace_of(
    parts: Split, times: LayerTimes, rate: Rate, is_gpu: bool, input_shape: tuple[int, ...] | None
) -> PaceSpec:
    """Return the pace of devices with this rate, whose layers take `times`.

    A GPU tells its host when it has done the body's forward or backward, or the head's backward:
    the last layer of each takes that time, too, as in the plan.
    """
    forward_s, backward_s = list(times.forward_s), list(times.backward_s)
    if is_gpu:
        count = len(parts.body.layers)
        forward_s[count - 1] += rate.sync_latency_s
        backward_s[parts.body.backward_order[-1]] += rate.sync_latency_s
        if parts.head.layers:
            backward_s[count + parts.head.backward_order[-1]] += rate.sync_latency_s
    size, targets = parts.body.batch_size, parts.body.target_nbytes
    return PaceSpec(
        samples=size,
        target_nbytes=LABEL_NBYTES if targets is None else targets // size,
        input_shape=input_shape,
        forward_s=tuple(forward_s),
        backward_s=tuple(backward_s),
        update_s=times.update_s,
    )


def _possible(workload: Workload) -> Iterator[int]:
    """Yield the first layers of heads, from the last on: matrices with nothing else behind them.

    A matrix by which several places of a sample are multiplied is like a convolution, and a table
    of which rows are taken comes before all: neither is a fully-connected layer. The last layer may
    be used at several places all the same.
    """
    layers = workload.layers
    dimensions = [_dimensions(layer) for layer in layers]
    known = any(layer.forward.flops for layer in layers)
    last = len(layers) - 1
    ahead = 0
    for i, layer in enumerate(layers):
        is_matrix = dimensions[i] == _MATRIX
        is_head = is_matrix and (i == last or not known or _is_connected(workload, layer))
        if dimensions[i] > _MATRIX or (is_matrix and not is_head):
            ahead = i
    for first in reversed(range(ahead + 1, len(layers))):
        if dimensions[first] == _MATRIX and refusal_of(workload, layers[first].name) is None:
            yield first


def _is_connected(workload: Workload, layer: Layer) -> bool:
    """Return True if each sample is multiplied by the layer's matrix once."""
    matrix = max(layer.parameters, key=lambda parameter: len(parameter.shape))
    products = layer.forward.flops / (2 * matrix.numel * workload.batch_size)
    rows = layer.activation_nbytes / (matrix.shape[0] * matrix.element_size * workload.batch_size)
    return products > _NO_PRODUCT and min(products, rows) < _SEVERAL


def _dimensions(layer: Layer) -> int:
    return max((len(parameter.shape) for parameter in layer.parameters), default=0)


def _nothing_connected(workload: Workload) -> str:
    layers = workload.layers
    if len(layers) == 1:
        return f"wheel: model {workload.name} has a single layer, {layers[0].name}, to split"
    last = max(range(len(layers)), key=lambda i: (_dimensions(layers[i]) > _MATRIX, i))
    shapes = ", ".join("x".join(map(str, p.shape)) for p in layers[last].parameters)
    return (
        f"wheel: model {workload.name} has no head to split off: no fully-connected layer follows "
        f"{layers[last].name} ({shapes}), unless one shares its weight with an embedding, which "
        "has to be untied then; choose a data-parallel strategy, or name by head the layer with "
        "which the head begins"
    )
