"""Two layers that are split between ranks, with 8-bit activations and errors between them.

    torchrun --nproc-per-node 2 activations.py

Each rank has its share of the samples and, of the two layers, its share of the hidden units. The
weights of these layers never travel: rows of activations do, by dynamic8, and so do their errors.
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from paceline.codecs import Sent, all_gather, reduce_scatter

HIDDEN, CODEC = 512, {"codec": "dynamic8", "activation_gradients": "dynamic8"}

dist.init_process_group("gloo")
rank, num_ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
labels = torch.tensor(digits.target)
own = slice(rank, None, num_ranks)

body = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU()))
torch.manual_seed(rank)  # each rank has other hidden units
units = HIDDEN // num_ranks
head = nn.ModuleList([nn.Linear(128, units), nn.Linear(units, 10, bias=False)])
optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1, momentum=0.9)
sent = Sent()


def scores_of(inputs: torch.Tensor) -> torch.Tensor:
    """Return the scores of this rank's samples, which all ranks work out together."""
    rows = all_gather(body(inputs), **CODEC, traffic=sent)  # those of all ranks
    parts = head[1](head[0](rows).relu())  # this rank's part of everybody's scores
    return reduce_scatter(parts, **CODEC, traffic=sent)  # summed over all ranks


for _ in range(8):
    batches = zip(images[own].split(32), labels[own].split(32), strict=True)
    for inputs, targets in batches:
        loss = cross_entropy(scores_of(inputs), targets)
        loss.backward()
        for parameter in head.parameters():
            parameter.grad /= num_ranks  # of the sum of all ranks' losses; the body's is a mean
        optimizer.step()
        optimizer.zero_grad()

with torch.no_grad():
    found = scores_of(images[own]).argmax(1) == labels[own]
counts = torch.tensor([found.sum(), len(found)])
dist.all_reduce(counts)
if rank == 0:
    nbytes = sent.activations_sent + sent.activation_gradients_sent
    print(f"accuracy {counts[0] / counts[1]:.2%} of the samples that it was trained with;", end=" ")
    print(f"rank 0 has sent {nbytes:,} bytes of activations and errors")
dist.destroy_process_group()
