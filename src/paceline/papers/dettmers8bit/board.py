"""Four GPUs on one board: tables 3 and 4, and the single-node model of section 5.1."""

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import permutations
from typing import NamedTuple

from paceline.core.cost import Measured, Roofline
from paceline.core.machine import Machine
from paceline.core.plan import Cost, Kind, Task
from paceline.core.simulate import period
from paceline.core.strategy import Window
from paceline.core.workload import Layer, Parameter, Workload
from paceline.machine_file import find_machine
from paceline.papers.cells import Basis, Cell, Table
from paceline.strategies.subbatch.config import SubBatch
from paceline.strategies.subbatch.plan import plan

GPUS = 4
BATCH = 128  # samples of a GPU, and of a sub-batch
TOTAL_MS, CONVNET2_MS = 104.1, 177.0  # sections 5.1.2 and 5.1.3
_MIB = 2**20


class Row(NamedTuple):
    """A layer of table 4: its shape, and milliseconds of fprop, bprop and update."""

    label: str
    outputs: int
    inputs: tuple[int, ...]
    handed_on: int
    baseline_ms: tuple[float, float, float]
    parallel_ms: tuple[float, float, float] = (0.0, 0.0, 0.0)


CONVOLUTIONS = (
    Row("conv11, 3 -> 64", 64, (3, 11, 11), 64 * 27 * 27, (4, 1, 3.5)),
    Row("conv5, 64 -> 192", 192, (64, 5, 5), 192 * 13 * 13, (10, 11, 11)),
    Row("conv3, 192 -> 384", 384, (192, 3, 3), 384 * 13 * 13, (5, 6, 5)),
    Row("conv3, 384 -> 256", 256, (384, 3, 3), 256 * 13 * 13, (6.5, 5.5, 6.5)),
    Row("conv3, 256 -> 256", 256, (256, 3, 3), 256 * 6 * 6, (4, 4, 5)),
)
CONNECTED = (
    Row("fc 9216 -> 3072", 3072, (9216,), 3072, (1.3, 1.3, 1.5), (0.9, 0.9, 0.43)),
    Row("fc 3072 -> 3072", 3072, (3072,), 3072, (0.45, 0.45, 0.5), (0.3, 0.3, 0.135)),
    Row("fc 3072 -> 1000", 1000, (3072,), 1000, (0.4, 0.4, 0.2), (0.15, 0.15, 0.08)),
)
ACTIVATION = "conv 3 activation"
FC_MS, PARALLEL_MS = 6.5, 3.34  # table 4 prints these sums

# Table 3: MB sent to each other GPU, and milliseconds of the exchange.
_PRINTED_MB = ("0.045", "0.29", "0.63", "0.85", "0.56", "1.125", "1.5", "1.5", "0.5")
SYNC_MS: dict[int, tuple[float | None, ...]] = {
    32: (0.05, 0.45, 1.0, 1.3, 0.9, 0.9, 1.1, 1.1, 0.4),
    8: (None, None, None, None, None, 0.4, 0.5, 0.5, 0.25),
}

# Section 5.1.2: which activation travels, by its row of table 3, and what hides it (ms).
_HIDDEN_MS = ((5, 0.9), (6, 0.3), (7, 0.15), (8, 0.3), (6, 0.9), (7, 0.64))
_BARE = 5  # transfers of conv 3 activations that nothing hides


def alexnet() -> Workload:
    """Return the network of table 4 on 128 images; its arithmetic is priced by that table."""
    made = [
        Layer(
            row.label,
            (Parameter("weight", (row.outputs, *row.inputs)),),
            4 * BATCH * row.handed_on,
            Cost(),
            Cost(),
        )
        for row in (*CONVOLUTIONS, *CONNECTED)
    ]
    order = tuple(reversed(range(len(made))))
    return Workload("AlexNet", BATCH, tuple(made), order, 4 * BATCH * 3 * 224 * 224)


def message_sizes() -> list[float]:
    """Return the bytes that a GPU sends to each other one, for the rows of table 3."""
    layers = alexnet().layers
    gradients = [layer.gradient_nbytes / GPUS for layer in layers[: len(CONVOLUTIONS)]]
    gathered = layers[len(CONVOLUTIONS) - 1].activation_nbytes / GPUS
    return [*gradients, gathered, *(layer.activation_nbytes for layer in layers[-3:])]


def messages_in_turn(machine: Machine) -> int:
    """Return how many messages cross the busiest link if each device sends to each other one."""
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
    """Return what of the fully connected layers' exchanges shows, as section 5.1.2 counts it."""
    times = [time or 0.0 for time in SYNC_MS[bits]]
    shown = sum(max(0.0, times[row] - hidden) for row, hidden in _HIDDEN_MS)
    return shown + _BARE * times[len(CONVOLUTIONS)]


def speedup(bits: int, total_ms: float = TOTAL_MS) -> float:
    """Return the speed-up of section 5.1.3's closed form."""
    exposed_ms = SYNC_MS[32][0] or 0.0
    step_ms = total_ms - FC_MS + exposed_ms + GPUS * PARALLEL_MS + penalty_ms(bits)
    return GPUS * total_ms / step_ms


def simulated(bits: int, total_ms: float = TOTAL_MS, as_table_3: bool = False) -> float:
    """Return the speed-up of the plan of strategy subbatch with the times of table 4.

    Messages take what the machine says, or, `as_table_3`, what that table prints for the exchange.
    """
    machine, codec = find_machine("pcie-4gpu"), None if bits == 32 or as_table_3 else "dynamic8"
    config = SubBatch(workers=GPUS, activations=codec, errors=codec)
    workload = alexnet()
    durations = {
        (task.on[0].owner, task.kind, task.part): 1e-3 * time
        for task in plan(workload, machine, config, Window(1)).tasks
        if (time := _task_ms(task, total_ms, bits if as_table_3 else None)) is not None
    }
    cost = Measured(durations, Roofline.of(machine))
    step_s = period(lambda steps: plan(workload, machine, config, Window(steps)), cost, 2)
    return GPUS * total_ms / (1e3 * step_s)


def _task_ms(task: Task, total_ms: float, bits: int | None) -> float | None:
    """Return a task's milliseconds by table 4 or, with `bits`, by table 3; None if by neither.

    Convolutions take what `total_ms` leaves for them, and loading what table 4 lacks of its total.
    The optimizer is not in that table.
    """
    times = _head_ms()
    if task.kind is Kind.STEP:
        return 0.0
    if (task.kind, task.part) in times:
        return times[task.kind, task.part]
    listed = sum(sum(row.baseline_ms) for row in CONVOLUTIONS)
    scale = (total_ms - FC_MS) / (TOTAL_MS - FC_MS)
    if task.kind is Kind.LOAD:
        return scale * (TOTAL_MS - FC_MS - listed)
    body = {row.label: row.baseline_ms for row in CONVOLUTIONS}
    if task.kind is Kind.FORWARD:
        return scale * body[task.part][0]
    if task.kind is Kind.BACKWARD:
        return scale * sum(body[task.part][1:])
    return None if bits is None else _exchange_ms(task.part, bits)


def _head_ms() -> Mapping[tuple[Kind, str], float]:
    times: dict[tuple[Kind, str], float] = {}
    for row in CONNECTED:
        forward, errors, weights = row.parallel_ms
        times[Kind.FORWARD, row.label] = forward
        times[Kind.BACKWARD, row.label] = errors
        times[Kind.BACKWARD, f"{row.label}:weights"] = weights
    return times


def _exchange_ms(part: str, bits: int) -> float | None:
    """Return what table 3 prints for what a layer gathers, or for a convolution's gradients.

    What a layer gathers is the activation before it. Logits are gathered as the paper does.
    """
    labels = [row.label for row in (*CONVOLUTIONS, *CONNECTED)] + ["loss"]
    row = labels.index(part.partition("/")[0].removesuffix(":errors"))
    return SYNC_MS[bits][row] or SYNC_MS[32][row]


def tables() -> Iterator[Table]:
    """Yield table 3, and the single-node model in the paper's closed form and simulated."""
    yield _table_3()
    yield Table(
        "Section 5.1: the single node's closed form",
        (
            Cell("fc layers, ms (Table 4)", 6.5, round(_sum_ms(0), 1), Basis.EXACT),
            Cell("fc layers in parallel, ms (Table 4)", 3.34, _sum_ms(1), Basis.EXACT),
            Cell("saved, ms", 3.16, round(FC_MS - PARALLEL_MS, 2), Basis.EXACT),
            Cell("penalty, ms, 32-bit", 6.81, round(penalty_ms(32), 2), Basis.EXACT),
            Cell("penalty, ms, 8-bit", 2.55, round(penalty_ms(8), 2), Basis.EXACT),
            *(
                Cell(label, printed, round(speedup(bits, total_ms), digits), Basis.EXACT)
                for label, bits, total_ms, printed, digits in _SPEEDUPS
            ),
        ),
    )
    for title, as_table_3 in (
        ("simulated on pcie-4gpu with Table 4's times", False),
        ("simulated with Table 3's and Table 4's times", True),
    ):
        cells = tuple(
            Cell(label, printed, simulated(bits, total_ms, as_table_3), Basis.PREDICTED)
            for label, bits, total_ms, printed, _ in _SPEEDUPS
        )
        yield Table(f"Section 5.1: the single node, {title}", cells)


_SPEEDUPS = (
    ("NervanaGPU, 32-bit", 32, TOTAL_MS, 3.53, 2),
    ("NervanaGPU, 8-bit", 8, TOTAL_MS, 3.67, 2),
    ("convnet2, 32-bit", 32, CONVNET2_MS, 3.71, 2),
    ("convnet2, 8-bit", 8, CONVNET2_MS, 3.8, 1),
)


def _sum_ms(in_parallel: int) -> float:
    rows = [(row.baseline_ms, row.parallel_ms)[in_parallel] for row in CONNECTED]
    return sum(map(sum, rows))


def _size_cell(name: str, printed: str, ours: float, row: int) -> Cell:
    """Return a size that the paper defines or, of a fully connected layer, one that it does not."""
    first = len(CONVOLUTIONS) + 1
    if row < first:
        digits = len(printed.partition(".")[2])
        return Cell(name, float(printed), round(ours, digits), Basis.EXACT)
    basis = Basis.CALIBRATED if row == first else Basis.PREDICTED
    return Cell(name, float(printed), ours, basis)


def _table_3() -> Table:
    machine, sizes = find_machine("pcie-4gpu"), message_sizes()
    labels = [row.label for row in CONVOLUTIONS] + [ACTIVATION] + [row.label for row in CONNECTED]
    cells = []
    for row, (label, printed, nbytes) in enumerate(zip(labels, _PRINTED_MB, sizes, strict=True)):
        cells.append(_size_cell(f"{label}: MB", printed, nbytes / _MIB, row))
        for bits in (32, 8):
            time = SYNC_MS[bits][row]
            if time is not None:
                ours = sync_ms(machine, nbytes, bits, row < len(CONVOLUTIONS))
                taken = (row, bits) in ((0, 32), (len(CONVOLUTIONS), 8))
                basis = Basis.CALIBRATED if taken else Basis.PREDICTED
                cells.append(Cell(f"{label}: ms, {bits}-bit", time, ours, basis))
    return Table("Table 3: MB to each other GPU, and ms of an exchange", tuple(cells))
