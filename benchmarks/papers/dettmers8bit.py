"""Dettmers, "8-Bit Approximations for Parallelism in Deep Learning" (ICLR 2016).

First the paper's single node with four GPUs on one board (tables 3 and 4, section 5.1), then its 32
nodes with 96 GPUs (tables 5, 6 and 7, section 5.2).
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import permutations
from typing import Any

from pydantic import TypeAdapter

from paceline.core.cost import ProfiledCost, Roofline
from paceline.core.machine import Machine
from paceline.core.plan import Kind, Task
from paceline.core.simulate import period
from paceline.core.strategy import Window
from paceline.records.machine_file import find_machine
from paceline.strategies.subbatch.config import SubBatch
from paceline.strategies.subbatch.plan import LABELS, LOSS, plan, returned_of, weights_of
from papers.alpha_beta import ring_s
from papers.dettmers8bit_network import (
    CONNECTED,
    CONVOLUTIONS,
    FC_MS,
    TOTAL_MS,
    alexnet,
)
from papers.dettmers8bit_planned import planned
from papers.paper_tables import Paper, paper_of, printed_values, read_printed

GPUS = 4
_BOARD, _CLUSTER = "pcie-4gpu", "infiniband-96gpu"
CONVNET2_MS = 177.0  # section 5.1.3
_MIB = 2**20


_PRINTED = read_printed("dettmers8bit")
ACTIVATION = "conv 3 activation"
PARALLEL_MS = 3.34  # table 4 prints this sum

# Milliseconds of an exchange, by its row of table 3 and the bits of a value.
SYNC_MS: dict[tuple[Any, ...], float] = {
    of: ms for of, ms in printed_values("dettmers8bit", "table 3").items() if of[1] != "MB"
}
_CONV11, _FC1, _FC2, _FC3 = CONVOLUTIONS[0].label, *(layer.label for layer in CONNECTED)
# Section 5.1.2: which activation travels, by its row of table 3, and what hides it (ms).
_HIDDEN_MS = ((ACTIVATION, 0.9), (_FC1, 0.3), (_FC2, 0.15), (_FC3, 0.3), (_FC1, 0.9), (_FC2, 0.64))
_BARE = 5  # transfers of conv 3 activations that nothing hides

# Of the cluster.
SAMPLES = 12288  # of a step: 128 for each of 96 GPUs
_KIB = 1024
_FIRST_PRODUCT_MS = 1.3  # table 4, fc 9216 -> 3072: what hides the next transfer (5.2.2)
_RATIO = {32: 1.0, 8: 1 / 8}  # of a message, as table 5 has it: 13.5 kB for 108
_FC_RATIO = 0.5  # as table 5 has it: 24 kB where 128 x 3072 values of 4 bytes, over 32, are 48
# Milliseconds of a message of a sub-batch, in 32 bits and in 8.
LATENCY_MS = TypeAdapter(dict[int, tuple[float, float]]).validate_python(_PRINTED["latency_ms"])


def paper() -> Paper:
    """Return the paper's tables with our values, which are computed now."""
    parts_ms: dict[str, Callable[..., float]] = {
        "forward": forward_ms,
        "single": single_ms,
        "full": full_ms,
        "total": total_ms,
    }
    return paper_of(
        "dettmers8bit",
        {
            # The speed-ups of both machines, as section 3.3 repeats them.
            "table 1": lambda gpus, sub_batch, bits: (
                round(speedup(bits), 2) if gpus == GPUS else speedup_of(total_ms(sub_batch, bits))
            ),
            "table 3": table_3,
            "closed form": {
                "fc layers, ms (Table 4)": round(sum(sum(row.baseline_ms) for row in CONNECTED), 1),
                "fc layers in parallel, ms (Table 4)": sum(
                    sum(row.parallel_ms) for row in CONNECTED
                ),
                "saved, ms": round(FC_MS - PARALLEL_MS, 2),
                "penalty, ms, 32-bit": round(penalty_ms(32), 2),
                "penalty, ms, 8-bit": round(penalty_ms(8), 2),
                "NervanaGPU, 32-bit": round(speedup(32), 2),
                "NervanaGPU, 8-bit": round(speedup(8), 2),
                "convnet2, 32-bit": round(speedup(32, CONVNET2_MS), 2),
                "convnet2, 8-bit": round(speedup(8, CONVNET2_MS), 1),
            },
            "simulated": simulated,
            "simulated with table 3": partial(simulated, as_table_3=True),
            "table 5": table_5,
            "table 6": lambda part, *of: parts_ms[part](*of),
            "table 7": lambda *of: speedup_of(total_ms(*of)),
            "table 5, planned": planned_value,
            "table 6, planned, single": planned_value,
            "table 6, planned, total": planned_value,
            "table 7, planned": planned_value,
            "section 5.2.2": {
                "exchange of the largest gradients": gradients_ms(),
                "latencies of fc activations, 128": round((num_others() + 1) * 0.008, 3),
                "latencies of fc activations, 256": round((num_others() + 1) * 0.015, 3),
                "baseline, s, NervanaGPU": round(0.096 * TOTAL_MS),
                "baseline, s, convnet2": round(0.096 * CONVNET2_MS),
            },
        },
        alpha_beta={
            "simulated": lambda bits, total_ms: _without_overlap(_BOARD, GPUS, bits, total_ms),
            "table 7, planned": lambda _, sub_batch, bits: _without_overlap(_CLUSTER, 96, bits),
        },
    )


def planned_value(what: str, sub_batch: int, bits: int) -> float:
    """Return what the plan of strategy subbatch says on 96 GPUs, a field of `Planned`."""
    found: float = getattr(planned(sub_batch, bits), what)
    return found


def _without_overlap(name: str, gpus: int, bits: int, total_ms: float = TOTAL_MS) -> float:
    """Return alpha-beta's speed-up of some GPUs: all gradients in a ring after computing."""
    machine = find_machine(name).for_workers(gpus)
    exchange_s = ring_s(machine, machine.first_devices(gpus), alexnet().gradient_nbytes * bits / 32)
    return gpus * total_ms / (total_ms + 1e3 * exchange_s)


def message_sizes() -> dict[str, float]:
    """Return the bytes that a GPU sends to each other one, for the rows of table 3."""
    layers = alexnet().layers
    body, head = layers[: len(CONVOLUTIONS)], layers[len(CONVOLUTIONS) :]
    return {
        **{layer.name: layer.gradient_nbytes / GPUS for layer in body},
        ACTIVATION: body[-1].activation_nbytes / GPUS,
        **{layer.name: float(layer.activation_nbytes) for layer in head},
    }


def messages_in_turn(machine: Machine) -> int:
    """Return the number of messages on the busiest link if each device sends to each other one."""
    load = Counter(
        hop for one, other in permutations(machine.devices, 2) for hop in machine.route(one, other)
    )
    return max(load.values())


def sync_ms(machine: Machine, nbytes: float, bits: int, is_gradient: bool) -> float:
    """Return the milliseconds of one exchange of 32-bit values of so many bytes for each other GPU.

    Gradients travel twice, raw and summed (section 5.2.2). In 8-bit all GPUs' values are decoded.
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


def penalty_ms(bits: int) -> float:
    """Return the exposed milliseconds of the fully connected layers' exchanges (section 5.1.2)."""
    shown = sum(max(0.0, SYNC_MS[row, bits] - hidden) for row, hidden in _HIDDEN_MS)
    return shown + _BARE * SYNC_MS[ACTIVATION, bits]


def speedup(bits: int, total_ms: float = TOTAL_MS) -> float:
    """Return the speed-up of section 5.1.3's closed form."""
    exposed_ms = SYNC_MS[_CONV11, 32]
    step_ms = total_ms - FC_MS + exposed_ms + GPUS * PARALLEL_MS + penalty_ms(bits)
    return GPUS * total_ms / step_ms


def simulated(bits: int, total_ms: float = TOTAL_MS, as_table_3: bool = False) -> float:
    """Return the speed-up of the plan of strategy subbatch with the times of table 4.

    Messages are priced by the machine, or with `as_table_3` by that table.
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
    """Return a task's milliseconds by table 4 or, with `bits`, by table 3; None if by neither.

    Convolutions take what `total_ms` leaves for them, and loading what table 4 lacks of its total.
    The optimizer and the labels are not in that table.
    """
    scale = (total_ms - FC_MS) / (TOTAL_MS - FC_MS)
    if task.kind is Kind.STEP or task.part == LABELS:
        return 0.0
    if task.kind is Kind.LOAD:
        listed = sum(sum(row.baseline_ms) for row in CONVOLUTIONS)
        return scale * (TOTAL_MS - FC_MS - listed)
    times: dict[tuple[Kind, str], float] = {}
    for row in CONVOLUTIONS:
        times[Kind.FORWARD, row.label] = scale * row.baseline_ms[0]
        times[Kind.BACKWARD, row.label] = scale * sum(row.baseline_ms[1:])
    for row in CONNECTED:
        forward, errors, weights = row.parallel_ms
        times[Kind.FORWARD, row.label] = forward
        times[Kind.BACKWARD, row.label] = errors
        times[Kind.BACKWARD, weights_of(row.label)] = weights
    if bits is None or (task.kind, task.part) in times:
        return times.get((task.kind, task.part))
    # A fully connected layer gathers the activations before it; a convolution exchanges gradients.
    body, head = ([row.label for row in rows] for rows in (CONVOLUTIONS, CONNECTED))
    rows_of_parts = zip([*body, *head, LOSS], [*body, ACTIVATION, *head], strict=True)
    label = next(row for part, row in rows_of_parts if task.part in (part, returned_of(part)))
    return SYNC_MS.get((label, bits), SYNC_MS[label, 32])


def table_3(label: str, what: str | int, digits: int | None = None) -> float:
    """Return the MB of a message, rounded if the paper defines it, or the ms of an exchange."""
    nbytes = message_sizes()[label]
    if what == "MB":
        return nbytes / _MIB if digits is None else round(nbytes / _MIB, digits)
    is_gradient = label in {row.label for row in CONVOLUTIONS}
    return sync_ms(find_machine(_BOARD), nbytes, int(what), is_gradient)


def num_others() -> int:
    """Return the number of nodes that a node sends to."""
    return find_machine(_CLUSTER).for_workers(96).num_hosts - 1


def message_kb(values: float, bits: int) -> float:
    """Return the KiB that each of 32 nodes sends of so many values to each other one."""
    return 4 * values / (num_others() + 1) / _KIB * _RATIO[bits]


def activation_kb(sub_batch: int, bits: int) -> float:
    """Return the KiB of a message with what the convolutions hand on for a sub-batch."""
    return message_kb(sub_batch * 9216, bits)


def effective_rate() -> float:
    """Return the KiB per millisecond through InfiniBand and PCIe together.

    It follows from table 6's 17.4 ms for 1024, which are 31 messages with their latencies.
    """
    return activation_kb(1024, 32) / (17.4 / num_others() - 0.3)


def single_ms(sub_batch: int, bits: int) -> float:
    """Return the milliseconds of sending one sub-batch's activations to all other nodes."""
    latency_ms = LATENCY_MS[sub_batch][(32, 8).index(bits)]
    return num_others() * (latency_ms + activation_kb(sub_batch, bits) / effective_rate())


def full_ms(sub_batch: int, bits: int) -> float:
    """Return table 6's milliseconds of all sub-batches: 31 transfers, or one if it is hidden."""
    once = single_ms(sub_batch, bits)
    return num_others() * (once - _FIRST_PRODUCT_MS) if once > _FIRST_PRODUCT_MS else once


def total_ms(sub_batch: int, bits: int) -> float:
    """Return the milliseconds of the fully connected layers and of the exposed transfers."""
    return forward_ms(sub_batch) + full_ms(sub_batch, bits)


def forward_ms(sub_batch: int) -> float:
    """Return the milliseconds of the fully connected layers, which are not split here."""
    return SAMPLES / sub_batch * FC_MS


def speedup_of(head_ms: float) -> float:
    """Return the speed-up over one GPU if the fully connected layers take so long."""
    return 96 * TOTAL_MS / (TOTAL_MS - FC_MS + head_ms)


def gradients_ms() -> float:
    """Return the exchange of the largest convolution's gradients (section 5.2.2).

    Two PCIe messages of a third and 31 InfiniBand messages, whose latency in table 5 is all that
    they take, both twice.
    """
    layer = max(alexnet().layers[:5], key=lambda layer: layer.gradient_nbytes)
    machine = find_machine(_CLUSTER).for_workers(96)
    (hop,) = machine.route(machine.devices[0], machine.hosts[0])
    nbytes = layer.gradient_nbytes / machine.num_hosts
    copy_ms = 1e3 * nbytes / 3 / hop.link.bandwidth_bytes_per_s
    return 2 * (2 * copy_ms + num_others() * 0.03)


def table_5(what: str, *of: int) -> float:
    """Return the number of passes, or the kB of a message with gradients or values handed on."""
    if what == "passes":
        return SAMPLES / of[0]
    if what == "gradients":
        largest = max(layer.num_parameters for layer in alexnet().layers[:5])
        return message_kb(largest, of[0])
    sub_batch, bits = of
    if what == "outputs":
        return _FC_RATIO * message_kb(sub_batch * 3072, bits)
    return activation_kb(sub_batch, bits)
