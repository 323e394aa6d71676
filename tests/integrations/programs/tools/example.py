"""Run an example, then run it with a part of its text replaced; save both results.

example.py EXAMPLE TEXT REPLACEMENT
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState

import paceline

PATH, OLD, NEW = sys.argv[1:]
made: list[str] = []
begin = paceline.DataParallel.__init__


def noted(self: paceline.DataParallel, *args: object, **options: object) -> None:
    made.append(str(options.get("exchange")))
    begin(self, *args, **options)


def trained(source: str) -> dict[str, Any]:
    """Run a program; return its wrappers, losses and trained weights."""
    made.clear()
    names: dict[str, Any] = {"__name__": "__main__", "__file__": PATH}
    exec(compile(source, PATH, "exec"), names)
    model = names["model"]
    return {
        "made": list(made),
        "losses": names["losses"] if "losses" in names else getattr(model, "losses", []),
        "weights": [parameter.detach().clone() for parameter in model.parameters()],
    }


paceline.DataParallel.__init__ = noted
text = Path(PATH).read_text()
assert text.count(OLD) == 1, OLD
ours = trained(text)
AcceleratorState._reset_state(reset_partial_state=True)
theirs = trained(text.replace(OLD, NEW))
torch.save([ours, theirs], f"rank{os.environ['RANK']}.pt")
