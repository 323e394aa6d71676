"""Train one worker as its own replica group under torchrun: elastic_worker.py NAME

Trains until the file `end` exists. NAME.steps has the number of steps and the number of workers,
NAME.bits a digest of the final state.
"""

import json
import os
import sys
import time
from datetime import timedelta
from hashlib import sha256
from pathlib import Path

import torch
import torchft
from torch import nn
from torch.nn.functional import mse_loss

import paceline
from paceline.exchange.elastic import ElasticWorkers

NAME = sys.argv[1]
DEADLINE = timedelta(seconds=6)


def tell(text: str, suffix: str) -> None:
    """Write a file atomically."""
    aside = Path(f"{NAME}.aside")
    aside.write_text(text)
    aside.rename(f"{NAME}.{suffix}")


def main() -> None:
    torch.manual_seed(sum(NAME.encode()))
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=DEADLINE),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        use_async_quorum=False,
        timeout=DEADLINE,
        quorum_timeout=timedelta(seconds=120),
        replica_id=NAME,
        hostname="127.0.0.1",
    )
    with paceline.LocalUpdates(
        model, optimizer, 5, codec="e3m0+feedback", manager=manager
    ) as updates:
        workers = updates._workers
        assert isinstance(workers, ElasticWorkers)
        while not Path("end").exists():
            tell(json.dumps([updates.num_steps, workers.count]), "steps")
            inputs = torch.randn(8, 16)
            optimizer.zero_grad()
            mse_loss(model(inputs), inputs[:, :4]).backward()
            optimizer.step()
            time.sleep(0.01)
    state = {name: one.clone() for name, one in model.state_dict().items()}
    bits = sha256(b"".join(one.numpy().tobytes() for one in state.values())).hexdigest()
    tell(bits, "bits")
    manager.shutdown()
    os._exit(0)  # torch's threads of lost peers sometimes abort a process that exits normally


if __name__ == "__main__":
    main()
