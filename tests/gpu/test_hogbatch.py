"""A hogbatch worker on a GPU pushes the updates of plain PyTorch into the shared model."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from hogbatch_replicas import classifying, net, on_gpu, samples
from paceline.links.devices import device_of
from paceline.strategies.hogbatch.replica import tensors_of
from paceline.training.recipes.optimizers import optimizer_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("depth", [1, 3])
def test_a_gpu_alone_trains_as_torch_does(depth: int):
    data, on = samples(), torch.device("cuda", 0)
    make, done = optimizer_of("sgd", 0.1, 0.9), []
    expected = net().to(on).train()
    optimizer = make(expected.parameters())
    batches = [torch.arange(start, start + 10 - number) for number, start in enumerate((0, 10, 30))]
    with on_gpu(classifying(net, data), make, device_of(on), depth=depth) as (replica, memory):
        for number, rows in enumerate(3 * batches):
            done += replica.take(rows, (1.0, 0.5, 2.0)[number % 3], number)
        done += replica.done(waits=True)
    for number, (rows, result) in enumerate(zip(3 * batches, done, strict=True)):
        inputs, targets = (part[rows].to(on) for part in data)
        optimizer.param_groups[0]["lr"] = 0.1 * (1.0, 0.5, 2.0)[number % 3]
        loss = cross_entropy(expected(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert result.loss == pytest.approx(len(rows) * float(loss.detach()), rel=1e-4)
    for name, tensor in tensors_of(expected).items():
        torch.testing.assert_close(memory.tensors[name], tensor.cpu(), rtol=1e-4, atol=1e-5)


def test_updates_are_neither_lost_nor_doubled_beside_those_of_others():
    """With a learning rate of zero, only the additions of others change the model."""
    device, make = device_of(torch.device("cuda", 0)), optimizer_of("sgd", 0.1, 0.0)
    with on_gpu(classifying(net, samples()), make, device) as (replica, memory):
        before = memory.tensors["0.weight"].clone()
        for _ in range(20):
            for _ in replica.take(torch.arange(40), 0.0, None):
                memory.tensors["0.weight"].add_(0.25)
        assert len(list(replica.done(waits=True))) == 2
    torch.testing.assert_close(memory.tensors["0.weight"], before + 18 * 0.25)
