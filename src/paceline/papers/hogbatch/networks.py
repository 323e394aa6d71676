"""The networks of table II as workloads, built from their layers' sizes."""

from dataclasses import dataclass
from itertools import pairwise

from paceline.core.workload import Cost, Layer, Parameter, Workload

_NBYTES = 8  # float64: 64,700 x 300 x 8 is w8a's 155 MB, and 72,309 x 20,958 x 8 real-sim's 12.1 GB
_FLOPS = 2  # a float64 operation takes both sorts of devices as long as two of float32
_SIGMOID = 4  # operations: 1 / (1 + exp(-x))
_SIGMOID_BACKWARD = 3  # g y (1 - y)


@dataclass(frozen=True)
class DataSet:
    """A row of table II: examples, the widths of all layers, and the thresholds of batches.

    `cpu_batch` are samples of each thread, `gpu_batch` of the GPU.
    """

    name: str
    num_examples: int
    widths: tuple[int, ...]
    cpu_batch: tuple[int, int]
    gpu_batch: tuple[int, int]


DATA_SETS = (
    DataSet("covtype", 581_012, (54, *(512,) * 6, 2), (1, 64), (128, 8192)),
    DataSet("w8a", 64_700, (300, *(512,) * 8, 2), (1, 64), (64, 8192)),
    DataSet("delicious", 16_105, (500, *(512,) * 8, 983), (1, 32), (64, 2048)),
    DataSet("real-sim", 72_309, (20_958, *(512,) * 4, 2), (1, 64), (64, 8192)),
)


def workload(data: DataSet, batch_size: int) -> Workload:
    """Return a step of the network on a batch: sigmoid layers without biases, in float64.

    A batch is the features and a value for each class.
    """
    pairs = list(pairwise(data.widths))
    layers = tuple(
        _layer(f"fc{number + 1}", inputs, outputs, batch_size, is_first=not number)
        for number, (inputs, outputs) in enumerate(pairs)
    )
    order = tuple(reversed(range(len(layers))))
    nbytes = _NBYTES * batch_size * (data.widths[0] + data.widths[-1])
    return Workload(data.name, batch_size, layers, order, nbytes)


def _layer(name: str, inputs: int, outputs: int, batch_size: int, *, is_first: bool) -> Layer:
    """Return a matrix product and a sigmoid; the first layer's input needs no gradient."""
    x, y, weights = batch_size * inputs, batch_size * outputs, inputs * outputs
    product = Cost(2 * _FLOPS * batch_size * weights, _NBYTES * (x + y + weights), 1)
    sigmoid = Cost(_SIGMOID * _FLOPS * y, 2 * _NBYTES * y, 1)
    derivative = Cost(_SIGMOID_BACKWARD * _FLOPS * y, 3 * _NBYTES * y, 1)
    backward = derivative + product if is_first else derivative + product + product
    parameter = Parameter("weight", (inputs, outputs), _NBYTES)
    return Layer(name, (parameter,), _NBYTES * y, product + sigmoid, backward)
