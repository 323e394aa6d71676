"""Recurrent layers on meta tensors as they run on the CPU, and not as their parts.

PyTorch chooses by device how LSTMs, GRUs and plain recurrent layers run. For meta tensors each time
step multiplies its own input. On the CPU the inputs of all steps are multiplied at once, whose
gradient is as large as what they were; and of an LSTM each layer and direction is one kernel of
oneDNN. Its workspace, kept for backward, has the gates, states and cells of all steps, and room for
the gradients of both.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, library
from torch._ops import OpOverload

_aten = torch.ops.aten
_LSTM = 2  # as PyTorch numbers the modes of recurrent layers
_OF_KERNEL = (torch.float32, torch.bfloat16)
_PAGE = 4096
_LINE = 64  # bytes that rows of a workspace are rounded up to
_ALIASED = 256  # rows of a multiple of so many values get another line
_BLOCK = 16  # inputs of a weight that its gradient is made of at once
_FLOAT = 4  # bytes of cells and gradients, whatever the values have

_KERNELS = (_aten.mkldnn_rnn_layer, _aten.mkldnn_rnn_layer_backward)

_Layer = Callable[[Tensor, Sequence[Tensor], Sequence[Tensor], bool], tuple[Tensor, list[Tensor]]]
_Cell = Callable[[Tensor, Tensor, Sequence[Tensor]], list[Tensor]]


@contextmanager
def recurrent_layers_as_on_cpu() -> Iterator[None]:
    """Trace recurrent layers on meta tensors as on the CPU; in the whole process, while it lasts.

    PyTorch takes one kernel for a device and operation: hold a lock meanwhile.
    """
    with library._scoped_library("aten", "IMPL") as aten:
        aten.impl("lstm.input", _lstm, "AutogradMeta")
        # PyTorch has a kernel of its own for this key, and before 2.13 refuses another unasked.
        aten.impl("mkldnn_rnn_layer", _lstm_kernel, "Meta", allow_override=True)
        for name, cell in (("gru", _gru_cell), ("rnn_tanh", _tanh_cell), ("rnn_relu", _relu_cell)):
            aten.impl(f"{name}.input", partial(_of_one_state, cell), "AutogradMeta")
        yield


def workspace_nbytes(steps: int, batch: int, inputs: int, hidden: int, element_size: int) -> int:
    """Return the bytes that oneDNN keeps of one layer and direction of an LSTM for backward.

    As its `rnn_utils` lays them out, each part on pages of its own: the gates and the hidden values
    of each step; states, and cells, and room for gradients of both, of each step and one more, of
    the layer and of what it reads.
    """
    widest, states = max(inputs, hidden), 2 * (steps + 1)
    parts = (
        steps * _row_nbytes(4 * hidden, element_size),
        steps * _row_nbytes(hidden, element_size),
        *2 * (states * _row_nbytes(widest, element_size),),  # handed up, and to the next step
        states * _row_nbytes(widest, _FLOAT),  # the gradients of these
        *2 * (states * hidden * _FLOAT,),  # cells, and their gradients
    )
    return sum(_in_pages(batch * part) for part in parts)


def scratch_nbytes(func: OpOverload, args: Sequence[Any]) -> int:
    """Return the bytes that an LSTM's kernel takes and gives back: 0 for any other operation.

    The gates of all steps, and two states; the weights in rows of its own; and in backward a
    gradient that is not contiguous, those of the last states, and those of weights whose inputs are
    no multiple of a block.
    """
    if func.overloadpacket not in _KERNELS:
        return 0
    inputs, _, of_states = args[:3]
    (steps, batch, width), hidden = inputs.shape, of_states.shape[1]
    gates, size = _row_nbytes(4 * hidden, inputs.element_size()), inputs.element_size()
    nbytes = _in_pages(steps * batch * gates) + 2 * _in_pages(batch * _row_nbytes(hidden, size))
    nbytes += (width + hidden) * gates
    if func.overloadpacket is _aten.mkldnn_rnn_layer:
        return int(nbytes)
    gradient = args[10]
    gathered = 0 if gradient is None or gradient.is_contiguous() else gradient.nbytes
    blocked = sum(-(-one // _BLOCK) * _BLOCK for one in (width, hidden) if one % _BLOCK)
    return int(nbytes + gathered + 2 * batch * hidden * _FLOAT + blocked * 4 * hidden * _FLOAT)


def _row_nbytes(values: int, element_size: int) -> int:
    """Return the bytes in which oneDNN keeps so many values of a sample."""
    per_line = _LINE // element_size
    padded = -(-values // per_line) * per_line
    return element_size * (padded + per_line * (padded % _ALIASED == 0))


def _in_pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


def _lstm(
    inputs: Tensor,
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    """Return what `lstm` of PyTorch does, and has the same arguments."""
    more = (has_biases, num_layers, dropout, train, bidirectional, batch_first)
    is_projected = hx[0].shape[2] != hx[1].shape[2]
    has_kernel = torch.backends.mkldnn.is_available() and inputs.dtype in _OF_KERNEL
    if is_projected or not has_kernel:
        return _step_by_step(_lstm_cell, inputs, hx, params, *more)

    def layer(
        x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], is_reversed: bool
    ) -> tuple[Tensor, list[Tensor]]:
        size = states[0].shape[-1]
        # For biases that are not there, PyTorch makes zeros of the shapes of weights.
        biases = weights[2:] if has_biases else [torch.zeros_like(one) for one in weights]
        outputs, *last, _ = _aten.mkldnn_rnn_layer(
            *(x, *weights[:2], *biases, *states, is_reversed, [], _LSTM, size, num_layers),
            *(has_biases, bidirectional, batch_first, train),
        )
        return outputs, last

    x = inputs.transpose(0, 1).contiguous() if batch_first else inputs
    outputs, last = _stacked(layer, x, hx, params, more)
    return (outputs.transpose(0, 1) if batch_first else outputs, *last)


def _lstm_kernel(inputs: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return tensors like those that `mkldnn_rnn_layer` returns, with a workspace of its size."""
    states, cells = arguments[4:6]
    steps, batch, width = inputs.shape
    hidden = states.shape[-1]
    nbytes = workspace_nbytes(steps, batch, width, hidden, inputs.element_size())
    workspace = inputs.new_empty(nbytes, dtype=torch.uint8)
    outputs = inputs.new_empty(steps, batch, hidden)
    return outputs, torch.empty_like(states), torch.empty_like(cells), workspace


def _of_one_state(cell: _Cell, inputs: Tensor, hx: Tensor, *more: Any) -> Any:
    """Return what `gru`, `rnn_tanh` or `rnn_relu` does, and has the same arguments after `cell`."""
    return _step_by_step(cell, inputs, [hx], *more)


def _step_by_step(
    cell: _Cell,
    inputs: Tensor,
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    """Return the outputs and the last states of layers without a kernel, as PyTorch makes them."""
    held = list[Tensor]()

    def layer(
        x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], is_reversed: bool
    ) -> tuple[Tensor, list[Tensor]]:
        of_inputs, of_states, *rest = weights
        if not is_reversed:  # PyTorch holds those of the first direction while it makes the others
            held.clear()
        bias = rest[0] if has_biases else None
        bias_of_states = rest[1] if has_biases else None
        projection = rest[2 * has_biases :]
        held[:] = F.linear(x, of_inputs, bias).unbind(0)
        state, outputs = list(states), []
        for step in reversed(held) if is_reversed else held:
            state = cell(step, F.linear(state[0], of_states, bias_of_states), state)
            for weight in projection:
                state[0] = state[0].matmul(weight.t())
            outputs.append(state[0])
        return torch.stack(outputs[::-1] if is_reversed else outputs), state

    more = (has_biases, num_layers, dropout, train, bidirectional, batch_first)
    x = inputs.transpose(0, 1) if batch_first else inputs
    outputs, last = _stacked(layer, x, hx, params, more)
    return (outputs.transpose_(0, 1) if batch_first else outputs, *last)


def _lstm_cell(of_inputs: Tensor, of_state: Tensor, state: Sequence[Tensor]) -> list[Tensor]:
    gates = of_state.add_(of_inputs).unsafe_chunk(4, 1)
    entry, forget, new, exit_ = gates
    entry, forget, new = entry.sigmoid_(), forget.sigmoid_(), new.tanh_()
    exit_ = exit_.sigmoid_()
    cells = (forget * state[1]).add_(entry * new)
    return [exit_ * cells.tanh(), cells]


def _gru_cell(of_inputs: Tensor, of_state: Tensor, state: Sequence[Tensor]) -> list[Tensor]:
    reset_in, update_in, new_in = of_inputs.unsafe_chunk(3, 1)
    reset, update, new = of_state.unsafe_chunk(3, 1)
    reset = reset.add_(reset_in).sigmoid_()
    update = update.add_(update_in).sigmoid_()
    new = new_in.add(new.mul_(reset)).tanh_()
    return [(state[0] - new).mul_(update).add_(new)]


def _tanh_cell(of_inputs: Tensor, of_state: Tensor, state: Sequence[Tensor]) -> list[Tensor]:
    return [of_state.add_(of_inputs).tanh()]


def _relu_cell(of_inputs: Tensor, of_state: Tensor, state: Sequence[Tensor]) -> list[Tensor]:
    return [of_state.add_(of_inputs).relu()]


def _stacked(
    layer: _Layer,
    x: Tensor,
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    more: tuple[bool, int, float, bool, bool, bool],
) -> tuple[Tensor, list[Tensor]]:
    """Return the outputs of the last layer (steps, batch, ...), and the last states of all.

    `hx` are first states: (layers and directions, batch, ...) each. `params` are those of each
    layer and direction in turn.
    """
    _, num_layers, dropout, train, bidirectional, _ = more
    num_directions = 1 + bidirectional
    num_params = len(params) // (num_layers * num_directions)
    last: list[list[Tensor]] = [[] for _ in hx]
    for number in range(num_layers):
        outputs = []
        for direction in range(num_directions):
            place = number * num_directions + direction
            weights = params[place * num_params : (place + 1) * num_params]
            states = [one[place] for one in hx]
            output, ends = layer(x, states, weights, direction > 0)
            outputs.append(output)
            for kept, end in zip(last, ends, strict=True):
                kept.append(end)
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if dropout and train and number < num_layers - 1:
            x = F.dropout(x, dropout)
    return x, [torch.stack(kept) for kept in last]
