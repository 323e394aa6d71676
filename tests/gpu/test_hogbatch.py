"""A worker on a GPU: what it pushes into the shared model is what torch's training changes."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from paceline.links.shared_memory import SharedTensors, pin
from paceline.models.factory import optimizer_of
from paceline.strategies.hogbatch.replica import CudaReplica, tensors_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))


def test_a_gpu_trains_as_torch_does_and_others_updates_are_kept():
    generator = torch.Generator().manual_seed(1)
    samples = (
        torch.randn(40, 6, generator=generator),
        torch.randint(4, (40,), generator=generator),
    )
    memory = SharedTensors.of(tensors_of(net()), "a model")
    unpin = pin(memory.memory)
    make, device = optimizer_of("sgd", 0.1, 0.9), torch.device("cuda", 0)
    replica = CudaReplica(net, memory.tensors, make, samples, 0, device)
    expected = net().to(device).train()
    optimizer = make(expected.parameters())
    for start, rate in ((0, 1.0), (10, 0.5), (30, 2.0)):
        rows = torch.arange(start, start + 10)
        done = replica.train(rows, rate, 0 if start == 30 else None)
        inputs, targets = (part[rows].to(device) for part in samples)
        optimizer.param_groups[0]["lr"] = 0.1 * rate
        loss = cross_entropy(expected(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert done.loss == pytest.approx(10 * float(loss.detach()), rel=1e-5)
        with torch.no_grad():  # somebody else's update, which the next copy takes in
            for tensor in (
                memory.tensors["0.weight"],
                dict(expected.named_parameters())["0.weight"],
            ):
                tensor.add_(0.01)
    for name, tensor in tensors_of(expected).items():
        torch.testing.assert_close(memory.tensors[name], tensor.cpu(), rtol=1e-4, atol=1e-5)
    names = {span.name for span in replica.spans}
    for task in ("h2d[batch]", "h2d[model]", "forward[0]", "backward[3]", "step", "d2h[update]"):
        assert f"s0/{task}@worker0" in names
    assert "s0/reduce[update]@worker0" in names
    unpin()
    memory.close()
