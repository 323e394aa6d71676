"""A training loop with torch's DistributedDataParallel: torchrun --nproc-per-node 2 before.py."""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
labels = torch.tensor(digits.target)
own = slice(dist.get_rank(), None, dist.get_world_size())  # each rank has its share of the samples

model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for _ in range(20):
    for inputs, targets in zip(images[own].split(32), labels[own].split(32), strict=True):
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

if dist.get_rank() == 0:
    accuracy = (model(images).argmax(1) == labels).float().mean()
    print(f"loss {loss:.4f}, accuracy {accuracy:.2%} of the samples that it was trained with")
dist.destroy_process_group()
