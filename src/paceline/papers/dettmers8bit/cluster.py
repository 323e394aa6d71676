"""32 nodes with 96 GPUs: tables 5, 6 and 7, and section 5.2."""

from collections.abc import Iterator
from typing import NamedTuple

from paceline.core.cost import Measured, link_lane
from paceline.core.plan import Kind, Plan, Resource, Task
from paceline.core.simulate import simulate
from paceline.machine_file import find_machine
from paceline.papers.cells import Basis, Cell, Table
from paceline.papers.dettmers8bit.board import FC_MS, TOTAL_MS, alexnet

SAMPLES = 12288  # of a step: 128 for each of 96 GPUs
_KIB = 1024
_FIRST_PRODUCT_MS = 1.3  # table 4, fc 9216 -> 3072: what hides the next transfer (5.2.2)
_RATIO = {32: 1.0, 8: 1 / 8}  # of a message, as table 5 has it: 13.5 kB for 108
_FC_RATIO = 0.5  # as table 5 has it: 24 kB where 128 x 3072 values of 4 bytes, over 32, are 48


class Row(NamedTuple):
    """A sub-batch size: table 5's milliseconds a message, and the printed cells of tables 5 to 7.

    Each pair is of 32-bit and 8-bit.
    """

    sub_batch: int
    num_passes: int
    size_kb: tuple[float, float]
    latency_ms: tuple[float, float]
    forward_ms: float
    single_ms: tuple[float, float]
    full_ms: tuple[float, float]
    total_ms: tuple[float, float]
    speedup: tuple[float, float]


# Latencies are table 5's, but for two: of 2048 (0.7 and 0.07 there) table 6 shows those of 1024,
# and of 12288 in 8-bit it shows 0.6, where table 5 prints 0.06.
ROWS = (
    Row(
        128, 96, (144, 18), (0.035, 0.007), 624, (2.1, 0.35), (24.8, 0.35), (650, 624), (13.4, 13.8)
    ),
    Row(256, 48, (288, 36), (0.07, 0.01), 312, (4.2, 0.55), (89.9, 0.55), (402, 312), (20, 24.4)),
    Row(512, 24, (576, 72), (0.1, 0.02), 156, (7.15, 1.13), (181, 1.13), (337, 157), (23, 39.3)),
    Row(
        1024, 12, (1152, 144), (0.3, 0.04), 78, (17.4, 2.25), (499, 29.5), (577, 108), (14.8, 48.6)
    ),
    Row(2048, 6, (2312, 289), (0.3, 0.04), 39, (25.5, 3.26), (750, 60.8), (789, 100), (11.3, 50.6)),
    Row(12288, 1, (13872, 1734), (5, 0.6), 6.5, (250, 31), (7750, 921), (7750, 928), (1.3, 9.7)),
)
_BITS = (32, 8)
_TAKEN = {("single", 1024, 32), ("single", 2048, 32), ("single", 2048, 8), ("single", 12288, 8)}
_TAKEN |= {("full", 128, 32)}


def num_others() -> int:
    """Return how many nodes a node sends to."""
    return find_machine("infiniband-96gpu").for_workers(96).num_hosts - 1


def message_kb(values: float, bits: int) -> float:
    """Return the KiB that each of 32 nodes sends of so many values to each other one."""
    return 4 * values / (num_others() + 1) / _KIB * _RATIO[bits]


def activation_kb(sub_batch: int, bits: int) -> float:
    """Return the KiB of a message with what the convolutions hand on for a sub-batch."""
    return message_kb(sub_batch * 9216, bits)


def effective_rate() -> float:
    """Return KiB a millisecond through InfiniBand and PCIe: what table 6's 17.4 ms for 1024 leave.

    31 messages pay the latency and this rate.
    """
    return activation_kb(1024, 32) / (17.4 / num_others() - 0.3)


def single_ms(row: Row, bits: int) -> float:
    """Return the milliseconds of sending one sub-batch's activations to all other nodes."""
    latency_ms = row.latency_ms[_BITS.index(bits)]
    return num_others() * (latency_ms + activation_kb(row.sub_batch, bits) / effective_rate())


def full_ms(row: Row, bits: int) -> float:
    """Return what table 6 counts for all sub-batches: 31 transfers, if they show at all."""
    once = single_ms(row, bits)
    return num_others() * (once - _FIRST_PRODUCT_MS) if once > _FIRST_PRODUCT_MS else once


def total_ms(row: Row, bits: int) -> float:
    """Return the milliseconds of the fully connected layers and what shows of the transfers."""
    return forward_ms(row) + full_ms(row, bits)


def forward_ms(row: Row) -> float:
    """Return the milliseconds of the fully connected layers, which are not split here."""
    return SAMPLES / row.sub_batch * FC_MS


def speedup_of(head_ms: float) -> float:
    """Return the speed-up over one GPU if the fully connected layers take so long."""
    return 96 * TOTAL_MS / (TOTAL_MS - FC_MS + head_ms)


def scheduled_ms(row: Row, bits: int) -> float:
    """Return the milliseconds of the same transfers and products as a schedule has them.

    Each sub-batch travels once, while the one before it is computed.
    """
    wire, lane = link_lane("node", "fabric"), Resource("gpu", "compute")
    tasks: list[Task] = []
    for number in range(SAMPLES // row.sub_batch):
        before = (f"send[{number - 1}]",) if number else ()
        tasks.append(Task(f"send[{number}]", Kind.SEND, (wire,), after=before))
        tasks.append(Task(f"head[{number}]", Kind.FORWARD, (lane,), after=(f"send[{number}]",)))
    sent = (wire.owner, Kind.SEND, "")
    cost = Measured({sent: single_ms(row, bits), (lane.owner, Kind.FORWARD, ""): FC_MS})
    return simulate(Plan(tasks), cost).makespan_s


def gradients_ms() -> float:
    """Return the exchange of the largest convolution's gradients (section 5.2.2).

    Two PCIe messages of a third and 31 InfiniBand messages, whose latency in table 5 is all that
    they take, both twice.
    """
    layer = max(alexnet().layers[:5], key=lambda layer: layer.gradient_nbytes)
    machine = find_machine("infiniband-96gpu").for_workers(96)
    (hop,) = machine.route(machine.devices[0], machine.hosts[0])
    nbytes = layer.gradient_nbytes / machine.num_hosts
    copy_ms = 1e3 * nbytes / 3 / hop.link.bandwidth_bytes_per_s
    return 2 * (2 * copy_ms + num_others() * 0.03)


def speedup_cells(prefix: str = "") -> list[Cell]:
    """Return the cells of table 7."""
    return [
        Cell(
            f"{prefix}{row.sub_batch}, {bits}-bit",
            row.speedup[number],
            speedup_of(total_ms(row, bits)),
            Basis.PREDICTED,
        )
        for row in ROWS
        for number, bits in enumerate(_BITS)
    ]


def tables() -> Iterator[Table]:
    """Yield tables 5 to 7, and the figures of section 5.2.2."""
    yield Table("Table 5: passes, and kB of a message to another node", tuple(_table_5()))
    yield Table("Table 6: ms of the fully connected layers, by sub-batch size", tuple(_table_6()))
    yield Table("Table 7: speed-ups on 96 GPUs, by sub-batch size", tuple(speedup_cells()))
    yield Table("Section 5.2.2: ms", tuple(_text()))


def _table_5() -> Iterator[Cell]:
    largest = max(layer.num_parameters for layer in alexnet().layers[:5])
    exact, predicted, taken = Basis.EXACT, Basis.PREDICTED, Basis.CALIBRATED
    yield Cell("conv3, 384 -> 256: 32-bit", 108, message_kb(largest, 32), exact)
    yield Cell("conv3, 384 -> 256: 8-bit", 13.5, message_kb(largest, 8), taken)
    for row in ROWS:
        label = f"conv 3 activation, {row.sub_batch}"
        yield Cell(f"{label}: passes", row.num_passes, SAMPLES / row.sub_batch, exact)
        for bits, printed in zip(_BITS, row.size_kb, strict=True):
            basis = exact if bits == 32 else predicted
            yield Cell(f"{label}: {bits}-bit", printed, activation_kb(row.sub_batch, bits), basis)
    for sub_batch, sizes in ((128, (24, 3)), (256, (48, 6))):
        for bits, printed in zip(_BITS, sizes, strict=True):
            ours = _FC_RATIO * message_kb(sub_batch * 3072, bits)
            basis = taken if (sub_batch, bits) == (128, 32) else predicted
            yield Cell(f"fc 9216 -> 3072, {sub_batch}: {bits}-bit", printed, ours, basis)


def _table_6() -> Iterator[Cell]:
    for row in ROWS:
        yield Cell(f"{row.sub_batch}: forward", row.forward_ms, forward_ms(row), Basis.EXACT)
        for part, printed, ours in (
            ("single", row.single_ms, single_ms),
            ("full", row.full_ms, full_ms),
            ("total", row.total_ms, total_ms),
        ):
            for number, bits in enumerate(_BITS):
                taken = (part, row.sub_batch, bits) in _TAKEN
                basis = Basis.CALIBRATED if taken else Basis.PREDICTED
                label = f"{row.sub_batch}: {part}, {bits}-bit"
                yield Cell(label, printed[number], ours(row, bits), basis)


def _text() -> Iterator[Cell]:
    yield Cell("exchange of the largest gradients", 1.9, gradients_ms(), Basis.PREDICTED)
    for sub_batch, latency_ms, printed in ((128, 0.008, 0.256), (256, 0.015, 0.48)):
        ours = round((num_others() + 1) * latency_ms, 3)
        yield Cell(f"latencies of fc activations, {sub_batch}", printed, ours, Basis.EXACT)
    for label, one_ms, printed in (("NervanaGPU", TOTAL_MS, 10.0), ("convnet2", 177.0, 17.0)):
        yield Cell(f"baseline, s, {label}", printed, round(0.096 * one_ms), Basis.EXACT)
