"""Dettmers, "8-Bit Approximations for Parallelism in Deep Learning" (ICLR 2016).

`board` is the paper's single node with four GPUs, `cluster` its 32 nodes with 96.
"""

from paceline.papers.cells import Basis, Cell, Paper, Table
from paceline.papers.dettmers8bit import board, cluster

_CALIBRATED = (
    ("0.456 us for a message on each PCIe link", "Table 3, conv11, 32-bit sync"),
    ("73 us to encode, and to decode", "Table 3, conv 3 activation, 8-bit sync"),
    ("fc activations are counted whole, not by a quarter", "Table 3, fc 9216 -> 3072, size"),
    ("8-bit messages are an eighth of 32-bit ones", "Table 5, conv3 384 -> 256, 8-bit size"),
    ("fc activations are halved", "Table 5, fc 9216 -> 3072 at 128, 32-bit size"),
    ("4.51 GB/s through InfiniBand and PCIe together", "Table 6, 1024, 32-bit single pass"),
    ("a full pass is 31 transfers, however many sub-batches", "Table 6, 128, 32-bit full pass"),
    ("a message of 2048 has the latency of one of 1024", "Table 6, 2048, both single passes"),
    ("0.6 ms for an 8-bit message of 12288", "Table 6, 12288, 8-bit single pass"),
)


def paper() -> Paper:
    """Return the paper's tables with our values, which are computed now."""
    return Paper(
        name="dettmers8bit",
        citation="Dettmers, 8-Bit Approximations for Parallelism in Deep Learning, ICLR 2016",
        tables=(
            _table_1(),
            *board.tables(),
            *cluster.tables(),
        ),
        calibrated=_CALIBRATED,
    )


def _table_1() -> Table:
    """Return the speed-ups of both, as section 3.3 repeats them."""
    four = [
        Cell(f"4 GPUs, 128, {bits}-bit", printed, round(board.speedup(bits), 2), Basis.EXACT)
        for bits, printed in ((32, 3.53), (8, 3.67))
    ]
    many = cluster.speedup_cells("96 GPUs, ")
    return Table("Table 1: speed-ups of AlexNet, by sub-batch size", (*four, *many))
