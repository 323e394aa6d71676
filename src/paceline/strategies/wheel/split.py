"""Split a model into first layers (body) and last layers (head), and count their messages.

    worker                                        hub
    body    -- labels, activations ------------>  head
    body    <-------- activation gradients -----  head  -- head gradients -->  server
    body    -- body gradients ---------------------------------------------->  server
    body    <------------------------------ body parameters -----------------  server

The head's parameters and gradients never leave the hub (Du et al. 2017, section 3.1).
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from paceline.core.cost import LayerTimes, Rate
from paceline.core.cutting import LOSS, refusal_of
from paceline.core.errors import InvalidInput
from paceline.core.names import not_known
from paceline.core.wire_format import Purpose, WireFormat, wire_format
from paceline.core.workload import Layer, Workload
from paceline.strategies.wheel.config import PaceSpec, Wheel

LABEL_NBYTES = 4  # a class index is sent as a 32-bit integer
_MATRIX = 2  # dimensions of a matrix; a convolution's weight has more
# Limits for a layer's number of matrix-vector products per sample. An embedding has none (below
# 0.5), a layer on whole samples about one, a layer on tokens several (2 or more).
_NO_PRODUCT, _SEVERAL = 0.5, 2
TO_HUB = (Purpose.LABELS, Purpose.ACTIVATIONS, Purpose.GRADIENTS)
FROM_HUB = (Purpose.ACTIVATION_GRADIENTS, Purpose.PARAMETERS)


class MessageSize(NamedTuple):
    """The size of a message, and its codec's wire format; None: values are sent unencoded."""

    num_values: int
    nbytes: int
    wire_format: WireFormat | None


class Split(NamedTuple):
    """The first and the last layers of a model; the body's outputs are the head's inputs."""

    body: Workload
    head: Workload

    @property
    def first(self) -> str:
        """The name of the head's first layer, or "loss"."""
        return self.head.layers[0].name if self.head.layers else LOSS

    @classmethod
    def before(cls, workload: Workload, first: int) -> "Split":
        """Split before layer number `first`, from 0; for len(layers), the head is only the loss."""
        layers, order = workload.layers, workload.backward_order
        in_body = tuple(i for i in order if i < first)
        in_head = tuple(i - first for i in order if i >= first)
        body = replace(workload, layers=layers[:first], backward_order=in_body)
        head = replace(workload, layers=layers[first:], backward_order=in_head)
        return cls(body, replace(head, input_nbytes=layers[first - 1].activation_nbytes))

    def resized(self, num_samples: int) -> "Split":
        """Return the halves with sizes for another batch size, but unchanged costs of layers."""
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
    """Cut the model before `config.head`; without this setting, where messages are smallest.

    Without `config.head`, the head consists of fully-connected layers at the model's end. Of layers
    that are applied to several positions of a sample (tokens), only the model's last layer is
    allowed. The head is the loss alone if every cut has failed (`workload.refused_cuts`) or sends
    more bytes than data parallelism (Du et al. 2017, section 3.4.4).

    Raises InvalidInput if `config.head` is unknown or is the first layer. Raises InvalidInput if
    the head would be the loss alone, and the outputs have more bytes than the parameters.
    """
    if config.head is not None:
        return Split.before(workload, _index_of(workload, config.head))
    cuts = [Split.before(workload, first) for first in _possible(workload)]
    best = min(cuts, key=lambda cut: on_the_wire(messages(cut, config)), default=None)
    if best is not None:
        sent = messages(best, config)
        crossing = sent[Purpose.ACTIVATIONS].nbytes + sent[Purpose.ACTIVATION_GRADIENTS].nbytes
        if crossing < sent[Purpose.HEAD_PARAMETERS].nbytes + sent[Purpose.HEAD_GRADIENTS].nbytes:
            return best
    whole = Split.before(workload, len(workload.layers))
    # With the loss alone as head, workers send the outputs in addition to all gradients, so accept
    # only outputs with fewer bytes than the gradients.
    if refusal_of(workload, LOSS) is None and whole.head.input_nbytes < workload.gradient_nbytes:
        return whole
    if best is None and workload.refused_cuts:
        raise InvalidInput.of(workload.refused_cuts[0][1])
    raise _no_head(workload, best)


def _index_of(workload: Workload, head: str) -> int:
    """Return the index of layer `head`; InvalidInput if the head cannot begin with this layer."""
    names = [layer.name for layer in workload.layers]
    if head == LOSS and LOSS not in names:
        return len(names)
    if head not in names[1:]:
        also = f": a layer of {workload.name} after the first layer"
        raise not_known("head", head, names[1:] or [LOSS], also)
    if refusal := refusal_of(workload, head):
        raise InvalidInput.of(refusal)
    return names.index(head)


def messages(parts: Split, config: Wheel) -> dict[Purpose, MessageSize]:
    """Return the sizes of a worker's messages per step, by purpose (paper's Table 1).

    Raises InvalidInput for a codec whose number of bytes depends on the values.
    """
    body, head = parts
    sizes = [p.element_size for layer in (*head.layers, *body.layers) for p in layer.parameters]
    crossing = (head.input_nbytes // (sizes[0] if sizes else 4), head.input_nbytes)
    in_body = (body.num_parameters, body.gradient_nbytes)
    in_head = (head.num_parameters, head.gradient_nbytes)
    targets, size = body.target_nbytes, body.batch_size
    values = {
        Purpose.LABELS: (size, LABEL_NBYTES * size if targets is None else targets),
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


def on_the_wire(sent: Mapping[Purpose, MessageSize]) -> int:
    """Return the bytes that one worker sends and receives in a step."""
    return sum(sent[purpose].nbytes for purpose in (*TO_HUB, *FROM_HUB))


def pace_of(
    parts: Split, times: LayerTimes, rate: Rate, is_gpu: bool, input_shape: tuple[int, ...] | None
) -> PaceSpec:
    """Return the times that a rehearsal's layers and updates take.

    As in the plan, a GPU synchronises with the host after the body's forward, the body's backward
    and the head's backward. The time of a synchronisation is part of the layer before it.
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
    """Yield the indices of layers with which the head may begin, from last to first.

    The head has no embedding table and no convolution. Only the model's last layer may be applied
    to several positions of a sample, such as tokens.
    """
    layers = workload.layers
    is_unknown = not any(layer.forward.flops for layer in layers)
    for first in reversed(range(1, len(layers))):
        layer, dimensions = layers[first], _dimensions(layers[first])
        if dimensions > _MATRIX:
            return
        if dimensions == _MATRIX:
            if not (is_unknown or first == len(layers) - 1 or _is_connected(workload, layer)):
                return
            if refusal_of(workload, layer.name) is None:
                yield first


def _is_connected(workload: Workload, layer: Layer) -> bool:
    """Return whether the layer is fully-connected and applies its matrix once per sample."""
    matrix = max(layer.parameters, key=lambda parameter: len(parameter.shape))
    products = layer.forward.flops / (2 * matrix.numel * workload.batch_size)
    rows = layer.activation_nbytes / (matrix.shape[0] * matrix.element_size * workload.batch_size)
    return products > _NO_PRODUCT and min(products, rows) < _SEVERAL


def _dimensions(layer: Layer) -> int:
    return max((len(parameter.shape) for parameter in layer.parameters), default=0)


def _no_head(workload: Workload, best: Split | None) -> InvalidInput:
    """Return the error for a model that should not be cut; `best`: the best possible cut."""
    layers, name = workload.layers, workload.name
    hint = "choose a data-parallel strategy, or set head to the head's first layer"
    problem = f"{name} has a single layer and cannot be split"
    if best is not None:
        sent, kept = 2 * best.head.input_nbytes, 2 * best.head.gradient_nbytes
        problem = (
            f"cutting {name} before {best.first} sends {sent / 1e6:.3g} MB of activations, and "
            f"saves only {kept / 1e6:.3g} MB of parameters and gradients"
        )
        hint = f"choose a data-parallel strategy, reduce batch_size, or set head={best.first}"
    elif len(layers) > 1:
        last = max(range(len(layers)), key=lambda i: (_dimensions(layers[i]) > _MATRIX, i))
        problem = f"{name} has no untied fully-connected layer after {layers[last].name}"
    return InvalidInput("strategy", problem, got="wheel", hint=hint)
