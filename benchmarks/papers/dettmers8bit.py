"""Simulate Dettmers, "8-Bit Approximations for Parallelism in Deep Learning" (ICLR 2016).

The machines are a single node with four GPUs on one board (tables 3 and 4, section 5.1), and 32
nodes with 96 GPUs (tables 5, 6 and 7, section 5.2).
"""

from collections import Counter
from itertools import permutations
from typing import Any

from paceline.core.cost import ProfiledCost, Roofline
from paceline.core.machine import Machine
from paceline.core.plan import Kind, Task
from paceline.core.simulate import period
from paceline.core.strategy import Window
from paceline.records.machine_file import find_machine
from paceline.strategies.subbatch.config import SubBatch
from paceline.strategies.subbatch.plan import LABELS, LOSS, plan, returned_of, weights_of
from papers.dettmers8bit_planned import (
    CONNECTED,
    CONVOLUTIONS,
    FC_MS,
    TOTAL_MS,
    alexnet,
    body_ms,
    planned,
)
from papers.paper_tables import Paper, paper_of, printed_values

GPUS = 4
_BOARD = "pcie-4gpu"
ACTIVATION = "conv 3 activation"

# Milliseconds of an exchange, by row of table 3 and bits per value.
SYNC_MS: dict[tuple[Any, ...], float] = printed_values("dettmers8bit", "table 3")


def paper() -> Paper:
    """Compute the paper's tables with our values."""

    def on_cluster(what: str, sub_batch: int, bits: int) -> float:
        return getattr(planned(sub_batch, bits), what)

    tables = ("table 5, planned", "table 6, planned, single", "table 6, planned, total")
    tables += ("table 7, planned",)
    return paper_of(
        "dettmers8bit",
        {"table 3": table_3, "simulated": simulated, **dict.fromkeys(tables, on_cluster)},
    )


def message_sizes() -> dict[str, float]:
    """Return the bytes that a GPU sends to each other GPU, by row of table 3."""
    layers = alexnet().layers
    body, head = layers[: len(CONVOLUTIONS)], layers[len(CONVOLUTIONS) :]
    return {
        **{layer.name: layer.gradient_nbytes / GPUS for layer in body},
        ACTIVATION: body[-1].activation_nbytes / GPUS,
        **{layer.name: float(layer.activation_nbytes) for layer in head},
    }


def messages_in_turn(machine: Machine) -> int:
    """Count messages on the busiest link if each device sends to every other device."""
    load = Counter(
        hop for one, other in permutations(machine.devices, 2) for hop in machine.route(one, other)
    )
    return max(load.values())


def sync_ms(machine: Machine, nbytes: float, bits: int, is_gradient: bool) -> float:
    """Return the milliseconds of exchanging `nbytes` of 32-bit values with each other GPU.

    Gradients travel twice, raw and summed (section 5.2.2). In 8 bits, a GPU decodes all values.
    """
    first, *_, last = machine.devices
    route = machine.route(first, last)
    latency_s = sum(hop.link.latency_s for hop in route)
    pace = max(1 / hop.link.bandwidth_bytes_per_s for hop in route)
    in_turn = messages_in_turn(machine) * (2 if is_gradient else 1)
    seconds = in_turn * (latency_s + nbytes * bits / 32 * pace)
    if bits == 8:
        speed, values = first.codecs["eightbit"], nbytes / 4
        seconds += values / speed.encode_values_per_s + speed.latency_s
        seconds += GPUS * values / speed.decode_values_per_s + speed.latency_s
    return 1e3 * seconds


def simulated(bits: int, total_ms: float = TOTAL_MS, as_table_3: bool = False) -> float:
    """Return the planned speed-up of strategy subbatch with table 4's compute times.

    Message times come from the machine file, or with `as_table_3` from table 3.
    """
    machine, codec = find_machine(_BOARD), None if bits == 32 or as_table_3 else "dynamic8"
    config = SubBatch(workers=GPUS, activations=codec, activation_gradients=codec)
    workload = alexnet()
    durations = {
        task.price_key: 1e-3 * time
        for task in plan(workload, machine, config, Window(1)).tasks
        if (time := _task_ms(task, total_ms, bits if as_table_3 else None)) is not None
    }
    cost = ProfiledCost(durations, Roofline.of(machine))
    step_s = period(lambda steps: plan(workload, machine, config, Window(steps)), cost, 2)
    return GPUS * total_ms / (1e3 * step_s)


def _task_ms(task: Task, total_ms: float, bits: int | None) -> float | None:
    """Return a task's milliseconds from table 4 or, with `bits`, table 3; otherwise None.

    Loading and convolutions are scaled to a total of `total_ms`. Optimizer and labels, which table
    4 omits, take no time.
    """
    if task.part == LABELS:
        return 0.0
    if (ms := body_ms(task)) is not None:
        return ms * (total_ms - FC_MS) / (TOTAL_MS - FC_MS)
    times: dict[tuple[Kind, str], float] = {}
    for row in CONNECTED:
        forward, errors, weights = row.parallel_ms
        times[Kind.FORWARD, row.label] = forward
        times[Kind.BACKWARD, row.label] = errors
        times[Kind.BACKWARD, weights_of(row.label)] = weights
    if bits is None or (task.kind, task.part) in times:
        return times.get((task.kind, task.part))
    # A fully connected layer gathers its input activations; a convolution exchanges gradients.
    body, head = ([row.label for row in rows] for rows in (CONVOLUTIONS, CONNECTED))
    rows_of_parts = zip([*body, *head, LOSS], [*body, ACTIVATION, *head], strict=True)
    label = next(row for part, row in rows_of_parts if task.part in (part, returned_of(part)))
    return SYNC_MS.get((label, bits), SYNC_MS[label, 32])


def table_3(label: str, bits: int) -> float:
    """Return our milliseconds for a cell of table 3."""
    is_gradient = label in {row.label for row in CONVOLUTIONS}
    return sync_ms(find_machine(_BOARD), message_sizes()[label], bits, is_gradient)
