"""One network and one batch: the prediction, and what PyTorch's allocator counts in a step.

    cell.py NETWORK BATCH

prints one JSON object.
"""

import json
import sys

import torch

from paceline.core.workload import kept_nbytes, replica_nbytes
from paceline.exchange.step import SGD, Share, train_step
from paceline.links.clock import HostClock
from paceline.record.recorder import Recorder
from paceline.studies.profile.memory_use import make_momentum, track
from paceline.training.models import describe, find


def main() -> None:
    """Measure, and print the figures."""
    network, batch_size = sys.argv[1], int(sys.argv[2])
    architecture = find(network)
    assert architecture.input_shape is not None
    assert architecture.num_classes is not None
    torch.manual_seed(0)
    model = architecture.build(None).train()
    inputs = torch.randn(batch_size, *architecture.input_shape)
    targets = torch.randint(architecture.num_classes, (batch_size,))
    workload = describe(model, inputs)
    optimizer = SGD().optimizer(model)
    make_momentum(model, optimizer)

    def step() -> None:
        source = iter((Share(inputs, targets, 1.0),))
        train_step(model, optimizer, source, Recorder(HostClock(), "", 0))

    predicted = replica_nbytes(workload)
    measured = track(step, model, optimizer, (inputs, targets)).peak_nbytes
    figures = {
        "image": list(architecture.input_shape),
        "parameters": workload.gradient_nbytes,
        "features": kept_nbytes(workload.layers),
        "predicted": predicted,
        "measured": measured,
        "error": predicted / measured - 1,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
