"""Measure bytes and samples/s of AlexNet on two one-core hosts at 1 Gbit/s.

Steps of `subbatch` and DDP run in the same two processes, in alternating blocks.
"""

from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

from hosts import TwoHosts, on_hosts
from torch.optim import SGD

import steps
from figures import shown, table
from paceline.core.workload import Workload
from paceline.exchange.step import Share
from paceline.links.clock import clock_for
from paceline.links.group import Group
from paceline.links.memory import KEEPING_MEMORY
from paceline.record.recorder import Recorder
from paceline.records.machine_file import find_machine
from paceline.strategies.subbatch.build import split
from paceline.strategies.subbatch.config import SubBatch
from paceline.strategies.subbatch.profile import planned_nbytes
from paceline.strategies.subbatch.trainer import SplitTrainer
from paceline.training.recipes.named import workload_of
from ranks import compare
from steps import Task

_MODEL, _BATCH_SIZE, _BUCKETS_MB = "alexnet", 16, (10, 25, 100)
_PAYLOAD = 1448 / 1514  # of a full Ethernet frame: TCP payload / frame bytes
_ALONE, _DDP = "alone, nothing exchanged", "DDP float32, buckets of {} MB"
_CODECS: dict[str, dict[str, str]] = {
    "subbatch": {},
    "subbatch, 8-bit": {"activations": "dynamic8", "activation_gradients": "dynamic8"},
    "subbatch, 8-bit, gradients too": dict.fromkeys(
        ("activations", "activation_gradients", "gradients"), "dynamic8"
    ),
}


def part(quick: bool) -> dict[str, Any]:
    """Return seconds and bytes of all variants."""
    with TwoHosts("1gbit") as hosts:
        folder = Path(__file__).parent
        return on_hosts(hosts, folder, "network", quick, environment=KEEPING_MEMORY)


def measure(group: Group, quick: bool) -> dict[str, Any]:
    """Return the seconds and bytes of all variants, as measured by this rank."""
    task = Task.synthetic(_MODEL, _BATCH_SIZE, group.device)
    wraps = {_ALONE: steps.alone, **{_DDP.format(mb): steps.ddp(mb) for mb in _BUCKETS_MB}}
    configs = {name: SubBatch(workers=group.world_size, **own) for name, own in _CODECS.items()}
    ours = {name: _trainer(config, task, group) for name, config in configs.items()}
    source = repeat(Share(task.inputs, task.targets, 1.0))
    others = [(name, partial(one.step, source)) for name, one in ours.items()]
    found = steps.taken(task, wraps, group, *((2, 1) if quick else (6, 2)), others=others)
    rows = compare(found.blocks, _DDP.format(_BUCKETS_MB[0]))
    for name, row in rows.items():
        row["wire_nbytes"] = (found.sent_nbytes[name] + found.received_nbytes[name]) / 2
    for name, one in ours.items():
        planned = planned_nbytes(_workload(), find_machine("two-hosts-gigabit"), configs[name])
        rows[name] |= {"sent": one.sent_nbytes, "planned": planned}
        one.close()
    return {"samples": _BATCH_SIZE * group.world_size, "variants": rows}


def _workload() -> Workload:
    return workload_of(_MODEL, _BATCH_SIZE)


def _trainer(config: SubBatch, task: Task, group: Group) -> SplitTrainer:
    model = split(task.build, _workload(), config, group, 0)
    recorder = Recorder(clock_for(group.device), f"cpu{group.rank}", group.rank)
    return SplitTrainer(
        *(model, config, group, recorder),
        lambda model: SGD(model.parameters(), 1e-4, momentum=0.9),
    )


def text(figures: dict[str, Any]) -> str:
    """Return the tables of steps and of bytes."""
    rows = figures["variants"]
    seconds = {name: row["seconds"]["median"] for name, row in rows.items()}
    best_s = min(own for name, own in seconds.items() if name.startswith("DDP"))
    lines = [
        (
            name,
            shown(row["seconds"], 1e3, 0),
            f"{figures['samples'] / seconds[name]:.2f}",
            f"{best_s / seconds[name]:.2f}",
            "" if name == _ALONE else f"{row['wire_nbytes'] / 1e6:.2f}",
        )
        for name, row in rows.items()
    ]
    head = ("", "ms a step", "samples/s", "times the best DDP", "MB each way")
    title = f"AlexNet, {_BATCH_SIZE} images a worker, two hosts, 1 Gbit/s"
    return f"{table(title, head, lines)}\n\n{_bytes(rows)}"


def _bytes(rows: dict[str, Any]) -> str:
    lines = []
    for name, row in rows.items():
        if "sent" not in row:
            continue
        planned, whole = row["planned"], sum(row["planned"].values())
        counted = {purpose: (own, planned[purpose]) for purpose, own in row["sent"].items()}
        counted |= {
            "all": (sum(row["sent"].values()), whole),
            "by the interface": (row["wire_nbytes"], whole),
            "by the interface, payload of its frames": (_PAYLOAD * row["wire_nbytes"], whole),
        }
        for purpose, (own, expected) in counted.items():
            more = f"{own / expected - 1:+.2%}" if expected else ""
            lines.append((name, purpose, f"{own / 1e6:.4f}", f"{expected / 1e6:.4f}", more))
    head = ("", "purpose", "MB a step", "by the plan", "more")
    return table("Bytes that a worker sends", head, lines)
