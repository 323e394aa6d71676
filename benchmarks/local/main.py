"""Measure local updates: time to a loss, loss by round length, and faults.

Two hosts are network namespaces and need root; the parts loss, elastic, 0.1m, 1m and 10m need no
root. A part of a size and a link, such as "1m 1gbit", needs the figures of part 1m.
"""

from functools import partial

import elastic
import loss
import steps_to_loss
import time_to_loss

import uneven
from figures import Part

PARTS = {
    "elastic, faults": Part(elastic.faults, elastic.text_of_faults),
    "elastic, torchft": Part(elastic.beside_torchft, elastic.text_beside),
    **{
        f"{size} {wire}": Part(
            partial(time_to_loss.measure, size, wire), partial(time_to_loss.text, f"{size} {wire}")
        )
        for size in steps_to_loss.CASES
        for wire in time_to_loss.WIRES
    },
    **{
        size: Part(partial(steps_to_loss.measure, case), partial(steps_to_loss.text, size))
        for size, case in steps_to_loss.CASES.items()
    },
    "loss": Part(loss.measure, loss.text),
    "uneven": Part(uneven.part, uneven.text),
}
FILES = {"src/paceline/strategies/local/loss_table.toml": steps_to_loss.loss_table}
