"""A loop of one's own on Accelerate: torchrun --nproc-per-node 2 train_with_accelerate.py."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from paceline.integrations.accelerate import with_paceline

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
accelerator = with_paceline(accelerator, exchange="host")
set_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
samples = TensorDataset(images, torch.tensor(digits.target))

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = DataLoader(samples, batch_size=16, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

losses = []
for _ in range(4):
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())

if accelerator.is_main_process:
    accuracy = (model(images).argmax(1) == samples.tensors[1]).float().mean()
    print(f"loss {losses[-1]:.4f}, accuracy {accuracy:.2%} of the samples it was trained with")
