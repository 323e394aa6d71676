"""Compare printed, planned and rehearsed speed-ups of four GPUs (Dettmers 2016, section 5.1)."""

from pathlib import Path
from typing import Any

from figures import shown, table
from papers import dettmers8bit as board
from papers.dettmers8bit_network import BATCH
from ranks import on_ranks

_PRINTED = {32: 3.53, 8: 3.67}


def measure(quick: bool) -> dict[str, Any]:
    """Return the planned speed-ups, and those rehearsed on four ranks."""
    figures = on_ranks(Path(__file__).parent, "board_rank", board.GPUS, quick)
    figures["planned"] = {
        str(bits): {
            "machine": board.simulated(bits),
            "table 3": board.simulated(bits, as_table_3=True),
        }
        for bits in _PRINTED
    }
    return figures


def text(figures: dict[str, Any]) -> str:
    """Return the table of speed-ups."""
    lines = []
    for bits, printed in _PRINTED.items():
        ours, planned = figures["speedups"][str(bits)], figures["planned"][str(bits)]
        lines.append(
            (
                f"{bits}-bit",
                f"{printed}",
                f"{planned['table 3']:.2f}",
                f"{planned['machine']:.2f}",
                shown(ours, digits=2),
                f"{ours['median'] / printed - 1:+.1%}",
                f"{figures['late'][str(bits)]:.1%}",
            )
        )
    head = ("", "printed", "planned, Table 3", "planned", "rehearsed", "of printed", "late")
    title = f"Speed-ups of four GPUs, {BATCH} images each; {figures['slower']:g} times slower"
    alone = shown(figures["alone_s"], 1e3 / figures["slower"], 1)
    return f"{table(title, head, lines)}\n\nOne GPU: {alone} ms a step, paced (104.1 printed)."
