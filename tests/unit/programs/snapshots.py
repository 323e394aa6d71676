"""Kill a process in the midst of saving, again and again; what it leaves is always a whole one.

All values of a snapshot are its version. Prints the versions that were found.
"""

import os
import signal
import time
from pathlib import Path

import torch
from torch import nn

from paceline.checkpoints.folder import CheckpointFolder
from paceline.checkpoints.writer import BackgroundWriter
from paceline.strategies.wheel.checkpoint import load, state_of
from paceline.strategies.wheel.cut import cut
from paceline.strategies.wheel.server import ParameterServer

FOLDER = CheckpointFolder(Path("snapshots"))
KILLS = 12
LAYOUT = '{"settings": {}}'

model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300), nn.Linear(300, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
halves = cut(model, torch.ones(2, 300), "1")
server = ParameterServer(model, halves, optimizer, num_workers=1, staleness=None)


def save_for_ever() -> None:
    writer = BackgroundWriter(FOLDER)
    while True:
        server.version += 1
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(server.version)
        writer.save(server.version, *state_of(server, "run", LAYOUT), wait=True)


def version() -> int:
    return max(FOLDER.steps, default=0)


for kill in range(KILLS):
    before = version()
    child = os.fork()
    if not child:
        save_for_ever()
    deadline = time.monotonic() + 600
    try:
        while version() == before and time.monotonic() < deadline:
            time.sleep(0.0005)
        time.sleep(0.0013 * kill)
        seen = version()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert load(FOLDER, server, layout=LAYOUT, run_id="run")[1].version >= seen > before
    assert {float(end) for p in model.parameters() for end in (p.min(), p.max())} == {
        server.version
    }
    print(server.version)
