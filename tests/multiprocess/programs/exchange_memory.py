"""What PyTorch allocates on each rank in two steps, in gradients of the model beside a replica."""

import json
import sys

import torch
from torch import nn

from paceline.exchange.step import SGD
from paceline.exchange.synchronized import Synchronized
from paceline.links.rendezvous import process_group
from paceline.strategies import STRATEGIES
from paceline.studies.profile.memory_use import make_momentum, track

SIZE = 1000  # of two layers: inputs and outputs of one sample are next to nothing


def main() -> None:
    with process_group(60.0) as group:
        found = {}
        for name in ("host", "tree"):
            model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE))
            optimizer = SGD(learning_rate=1e-4).optimizer(model)
            make_momentum(model, optimizer)
            strategy, inputs = STRATEGIES[name], torch.zeros(1, SIZE)
            method = strategy.runner().method(strategy.config(workers=group.world_size))

            def steps(model=model, optimizer=optimizer, method=method, inputs=inputs) -> None:
                # On cores gradients of host could be views of the host's memory; not on a GPU.
                views = {"gradient_as_bucket_view": method.name == "tree", "init_sync": False}
                replica = Synchronized(model, method, group=group, **views)
                for _ in range(2):
                    replica(inputs).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                replica.close()

            nbytes = sum(one.nbytes for one in model.parameters())
            peak = track(steps, model, optimizer, inputs).peak_nbytes
            found[name] = group.gather(peak / nbytes - 3)  # parameters, momentum, gradients
        if group.rank == 0:
            sys.stdout.write(json.dumps(found) + "\n")


main()
