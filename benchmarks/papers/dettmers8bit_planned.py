"""Describe the network of Dettmers 2016, table 4, and plan section 5.2: subbatch on 96 GPUs.

The plan splits the head among all GPUs, which section 5.2.2 leaves out as too complex to analyse.
It also sends the errors back. Convolutions have table 4's times. The machine file
`machines/infiniband-96gpu.toml` prices the head's products, the codec and the messages; its message
latency is the latency of table 5's smallest message.
"""

from dataclasses import replace
from functools import cache
from typing import NamedTuple

from pydantic import TypeAdapter

from paceline.core.cost import ProfiledCost, Roofline
from paceline.core.plan import Kind, Task
from paceline.core.simulate import period
from paceline.core.strategy import Window
from paceline.core.workload import Cost, Layer, Parameter, Workload
from paceline.records.machine_file import find_machine
from paceline.strategies.subbatch.config import SubBatch
from paceline.strategies.subbatch.plan import plan
from papers.paper_tables import read_printed

GPUS = 96
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


@cache
def priced_alexnet() -> Workload:
    """Return table 4's network with the costs of its fully connected layers."""
    whole = alexnet()
    body = whole.layers[: len(CONVOLUTIONS)]
    head = whole.layers[len(body) :]
    inputs = [layer.activation_nbytes for layer in (body[-1], *head)]
    worked = tuple(_worked(layer, before) for layer, before in zip(head, inputs, strict=False))
    return replace(whole, layers=(*body, *worked))


def _worked(layer: Layer, input_nbytes: int) -> Layer:
    """Return a linear layer with its costs: one product forward, two products backward."""
    moved = layer.gradient_nbytes + input_nbytes + layer.activation_nbytes
    product = Cost(2 * BATCH * layer.num_parameters, moved, 1)
    return replace(layer, forward=product, backward=product + product)


def body_ms(task: Task) -> float | None:
    """Return milliseconds of loading, convolutions and updates (0) by table 4; None for others.

    Loading is the part of `TOTAL_MS` that table 4 does not list.
    """
    if task.kind is Kind.STEP:
        return 0.0
    if task.kind is Kind.LOAD:
        return TOTAL_MS - FC_MS - sum(sum(row.baseline_ms) for row in CONVOLUTIONS)
    times = {row.label: row.baseline_ms for row in CONVOLUTIONS}
    if task.part not in times or task.kind not in (Kind.FORWARD, Kind.BACKWARD):
        return None
    forward, *backward = times[task.part]
    return forward if task.kind is Kind.FORWARD else sum(backward)


class Planned(NamedTuple):
    """Planned values of one sub-batch size: milliseconds, and the speed-up over one GPU.

    `message_ms`, `single_ms`: time to send the head's input activations, for one message and for a
    sub-batch. `total_ms`: time of a step without loading and convolutions.
    """

    message_ms: float
    single_ms: float
    total_ms: float
    speedup: float


@cache
def planned(sub_batch: int, bits: int) -> Planned:
    """Plan sub-batches of `sub_batch` samples, sent with `bits` bits per value."""
    machine = find_machine("infiniband-96gpu").for_workers(GPUS, symmetric=True)
    workload = priced_alexnet()
    codec = None if bits == 32 else "dynamic8"
    config = SubBatch(GPUS, None, codec, codec, sub_batch=sub_batch)
    steps = {number: plan(workload, machine, config, Window(number)) for number in (2, 4)}
    timed = ((task.price_key, body_ms(task)) for task in steps[2].tasks)
    known = {key: 1e-3 * ms for key, ms in timed if ms is not None}
    prices = ProfiledCost(known, Roofline.of(machine))
    step_ms = 1e3 * period(steps.__getitem__, prices, 2)
    first = workload.layers[len(CONVOLUTIONS)].name
    sends = [task for task in steps[2].tasks if task.kind is Kind.SEND and task.id.step == 0]
    sent = [task for task in sends if task.part == first]
    single_ms = 1e3 * sum(map(prices.seconds, sent)) / len(sent)
    return Planned(
        message_ms=single_ms / sent[0].cost.num_calls,
        single_ms=single_ms,
        total_ms=step_ms - (TOTAL_MS - FC_MS),
        speedup=GPUS * TOTAL_MS / step_ms,
    )
