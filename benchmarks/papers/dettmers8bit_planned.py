"""Plan section 5.2 of Dettmers 2016: strategy subbatch on 96 GPUs, by sub-batch size.

The plan splits the head among all GPUs, which section 5.2.2 leaves out as too complex to analyse.
It also sends the errors back. Convolutions have table 4's times. The machine file
`machines/infiniband-96gpu.toml` prices the head's products, the codec and the messages; its message
latency is the latency of table 5's smallest message.
"""

from dataclasses import dataclass, replace
from functools import cache

from paceline.core.cost import CostModel, ProfiledCost, Roofline
from paceline.core.machine import Machine
from paceline.core.plan import Kind, Plan, PriceKey, Task
from paceline.core.simulate import period
from paceline.core.strategy import Window
from paceline.core.workload import Cost, Layer, Workload
from paceline.records.machine_file import find_machine
from paceline.strategies.subbatch.config import SubBatch
from paceline.strategies.subbatch.plan import plan
from papers import dettmers8bit_network as table_4

GPUS = 96


@dataclass(frozen=True, slots=True)
class Planned:
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
    codec = None if bits == 32 else "dynamic8"
    config = SubBatch(GPUS, None, codec, codec, sub_batch=sub_batch)
    steps = {number: plan(alexnet(), machine, config, Window(number)) for number in (2, 4)}
    prices = _prices(steps[2], machine)
    step_ms = 1e3 * period(steps.__getitem__, prices, 2)
    first = alexnet().layers[len(table_4.CONVOLUTIONS)].name
    sends = [task for task in steps[2].tasks if task.kind is Kind.SEND and task.id.step == 0]
    sent = [task for task in sends if task.part == first]
    single_ms = 1e3 * sum(map(prices.seconds, sent)) / len(sent)
    return Planned(
        message_ms=single_ms / sent[0].cost.num_calls,
        single_ms=single_ms,
        total_ms=step_ms - (table_4.TOTAL_MS - table_4.FC_MS),
        speedup=GPUS * table_4.TOTAL_MS / step_ms,
    )


@cache
def alexnet() -> Workload:
    """Return the network of table 4 on 128 images, with the costs of its fully connected layers."""
    whole = table_4.alexnet()
    body = whole.layers[: len(table_4.CONVOLUTIONS)]
    head = whole.layers[len(body) :]
    inputs = [layer.activation_nbytes for layer in (body[-1], *head)]
    worked = tuple(_worked(layer, before) for layer, before in zip(head, inputs, strict=False))
    return replace(whole, layers=(*body, *worked))


def _worked(layer: Layer, input_nbytes: int) -> Layer:
    """Return a linear layer with its costs: one product forward, two products backward."""
    moved = layer.gradient_nbytes + input_nbytes + layer.activation_nbytes
    product = Cost(2 * table_4.BATCH * layer.num_parameters, moved, 1)
    return replace(layer, forward=product, backward=product + product)


def _prices(steps: Plan, machine: Machine) -> CostModel:
    known: dict[PriceKey, float] = {}
    for task in steps.tasks:
        if (ms := _ms(task)) is not None:
            known[task.price_key] = 1e-3 * ms
    return ProfiledCost(known, Roofline.of(machine))


def _ms(task: Task) -> float | None:
    """Return a task's milliseconds by table 4 (0 for updates); None if table 4 has no time."""
    if task.kind is Kind.STEP:
        return 0.0
    if task.kind is Kind.LOAD:
        listed = sum(sum(row.baseline_ms) for row in table_4.CONVOLUTIONS)
        return table_4.TOTAL_MS - table_4.FC_MS - listed
    times = {row.label: row.baseline_ms for row in table_4.CONVOLUTIONS}
    if task.part not in times or task.kind not in (Kind.FORWARD, Kind.BACKWARD):
        return None
    forward, *backward = times[task.part]
    return forward if task.kind is Kind.FORWARD else sum(backward)
