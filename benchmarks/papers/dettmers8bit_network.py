"""Define the network of Dettmers 2016, table 4: layers and their milliseconds on one GPU."""

from typing import NamedTuple

from pydantic import TypeAdapter

from paceline.core.workload import Cost, Layer, Parameter, Workload
from papers.paper_tables import read_printed

BATCH = 128  # samples per GPU
TOTAL_MS = 104.1  # section 5.1.2
FC_MS = 6.5  # sum of the fully connected layers, as table 4 prints it


class AlexNetLayer(NamedTuple):
    """A layer of table 4: its shape, and milliseconds of fprop, bprop and update.

    `handed_on`: number of values per image that the next layer receives. `parallel_ms`: times of a
    fully connected layer that is split over four GPUs.
    """

    label: str
    outputs: int
    inputs: tuple[int, ...]
    handed_on: int
    baseline_ms: tuple[float, float, float]
    parallel_ms: tuple[float, float, float] = (0.0, 0.0, 0.0)


_PRINTED = read_printed("dettmers8bit")
_Layers = TypeAdapter(tuple[AlexNetLayer, ...])
CONVOLUTIONS = _Layers.validate_python(_PRINTED["convolutions"])
CONNECTED = _Layers.validate_python(_PRINTED["connected"])


def alexnet() -> Workload:
    """Return table 4's network on 128 images; costs are zero, as table 4 prints the times."""
    made = []
    for row in (*CONVOLUTIONS, *CONNECTED):
        weight = Parameter("weight", (row.outputs, *row.inputs))
        made.append(Layer(row.label, (weight,), 4 * BATCH * row.handed_on, Cost(), Cost()))
    order = tuple(reversed(range(len(made))))
    return Workload("AlexNet", BATCH, tuple(made), order, 4 * BATCH * 3 * 224 * 224)
