"""A loop of one's own on Lightning Fabric: torchrun --nproc-per-node 2 train_with_fabric.py."""

import torch
from lightning.fabric import Fabric
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from paceline.integrations.fabric import PacelineStrategy

fabric = Fabric(strategy=PacelineStrategy(exchange="host"), accelerator="cpu", devices=2)
fabric.launch()
fabric.seed_everything(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
samples = TensorDataset(images, torch.tensor(digits.target))

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(DataLoader(samples, batch_size=16, shuffle=True))

losses = []
for _ in range(4):
    for step, (inputs, targets) in enumerate(loader, 1):
        is_last = step % 2 == 0 or step == len(loader)  # two micro-batches make a step
        with fabric.no_backward_sync(model, enabled=not is_last):
            loss = cross_entropy(model(inputs), targets)
            fabric.backward(loss / 2)
        losses.append(loss.item())
        if is_last:
            optimizer.step()
            optimizer.zero_grad()

if fabric.is_global_zero:
    accuracy = (model(images).argmax(1) == samples.tensors[1]).float().mean()
    print(f"loss {losses[-1]:.4f}, accuracy {accuracy:.2%} of the samples it was trained with")
