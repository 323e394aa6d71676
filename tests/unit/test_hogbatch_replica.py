"""What a worker computes, in this process: torch's own training is the oracle."""

import copy
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hogbatches import classifying
from paceline.core.errors import InvalidInput
from paceline.core.plan import Kind
from paceline.links.shared_memory import SharedTensors
from paceline.models import describe
from paceline.recipes.optimizers import optimizer_of
from paceline.strategies.hogbatch.policy import rate_factor
from paceline.strategies.hogbatch.replica import CpuReplica, refer, tensors_of


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))


def samples(rows: slice | torch.Tensor = slice(None)) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(40, 6, generator=generator)
    return inputs[rows], torch.randint(4, (40,), generator=generator)[rows]


@pytest.fixture
def shared():
    memory = SharedTensors.of(tensors_of(net()), "a model")
    yield memory
    memory.close()


@pytest.mark.parametrize("slow", [1.0, 3.0])
@pytest.mark.parametrize(
    ("name", "momentum"), [("sgd", 0.0), ("SGD", 0.9), ("adam", 0.0), ("rmsprop", 0.0)]
)
def test_a_thread_trains_as_torch_does(shared, name: str, momentum: float, slow: float):
    make = optimizer_of(name, 0.1, momentum)
    replica = CpuReplica(classifying(net, samples()), shared.tensors, make, worker=0, slow=slow)
    expected = net().train()
    optimizer = make(expected.parameters())
    for start, rate in ((0, 1.0), (10, 0.5), (30, 2.0)):
        rows = torch.arange(start, start + 10)
        done = replica.train(rows, rate, None)
        inputs, targets = samples(rows)
        optimizer.param_groups[0]["lr"] = 0.1 * rate
        loss = cross_entropy(expected(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert done.updates == 1
        assert done.loss == pytest.approx(10 * float(loss.detach()))
    for tensor_name, tensor in tensors_of(expected).items():
        assert torch.equal(shared.tensors[tensor_name], tensor), tensor_name


def test_threads_make_an_update_each_in_proportion_to_their_samples(shared):
    """On a model without curvature updates add up, in whatever order they come."""

    def linear() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(6, 4, bias=False)

    memory = SharedTensors.of(tensors_of(linear()), "a model")
    tiny = 1e-4  # of which the second order is beyond float32
    make = optimizer_of("sgd", tiny, 0.0)
    recipe = classifying(linear, samples())
    replica = CpuReplica(recipe, memory.tensors, make, worker=0, threads=3)
    rows = torch.arange(11)  # 4, 4 and 3
    assert replica.train(rows, 1.0, None).updates == 3
    assert replica.train(rows[:2], 1.0, None).updates == 2
    expected = linear()
    for part in (rows, rows[:2]):
        inputs, targets = samples(part)
        cross_entropy(expected(inputs), targets).backward()
    change = memory.tensors["weight"] - linear().weight
    torch.testing.assert_close(change, -tiny * expected.weight.grad, rtol=0.05, atol=1e-8)
    memory.close()


def test_a_loss_that_is_no_number_leaves_the_parameters_alone(shared):
    before = {name: tensor.clone() for name, tensor in shared.tensors.items()}
    bad = (torch.full((4, 6), torch.nan), torch.zeros(4, dtype=torch.int64))
    recipe, make = classifying(net, bad), optimizer_of("sgd", 0.1, 0.0)
    replica = CpuReplica(recipe, shared.tensors, make, worker=0)
    done = replica.train(torch.arange(4), 1.0, None)
    assert done.loss != done.loss
    for name, _ in net().named_parameters():
        assert torch.equal(shared.tensors[name], before[name])


@pytest.mark.parametrize("threads", [1, 2])
def test_a_traced_batch_has_the_layers_of_the_model(shared, threads: int):
    make = optimizer_of("sgd", 0.1, 0.0)
    recipe = classifying(net, samples())
    replica = CpuReplica(recipe, shared.tensors, make, worker=5, threads=threads, slow=2.0)
    replica.train(torch.arange(8), 1.0, None)
    assert replica.spans == []
    replica.train(torch.arange(8), 1.0, 0)
    layers = [layer.name for layer in describe(net(), torch.zeros(8, 6), "net").layers]
    assert layers == ["0", "1", "3"]
    names = [span.name for span in replica.spans]
    assert sorted(names) == sorted(
        [f"s0/forward[{layer}]@worker5" for layer in layers]
        + [f"s0/backward[{layer}]@worker5" for layer in layers]
        + ["s0/step@worker5"]
    )
    by_time = sorted(replica.spans, key=lambda span: (span.start_s, span.end_s))
    kinds = [span.kind for span in by_time]
    assert kinds == [Kind.FORWARD] * 3 + [Kind.BACKWARD] * 3 + [Kind.STEP]
    for earlier, later in pairwise(by_time):
        assert later.start_s >= earlier.end_s - 1e-9
    assert by_time[-1].num_samples == 8


def test_tied_weights_stay_tied():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(4, 4, bias=False)
            self.other = nn.Linear(4, 4, bias=False)
            self.other.weight = self.one.weight

    memory = SharedTensors.of(tensors_of(Tied()), "a model")
    assert list(memory.tensors) == ["one.weight"]
    model = Tied()
    refer(model, memory.tensors)
    with torch.no_grad():
        memory.tensors["one.weight"].fill_(7.0)
    assert model.other.weight is model.one.weight
    assert float(model.other.weight.detach().sum()) == 7 * 16
    memory.close()


def test_shared_tensors_are_seen_by_whoever_has_the_descriptor():
    tensors = {
        "float": torch.arange(5.0),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(7),
        "bool": torch.tensor([True, False]),
        "half": torch.ones(2, 2, dtype=torch.bfloat16).T,
    }
    memory = SharedTensors.of(tensors, "tensors")
    other = SharedTensors(memory.fd, memory.entries)
    for name, tensor in tensors.items():
        assert torch.equal(other.tensors[name], tensor)
        assert other.tensors[name].dtype == tensor.dtype
    other.tensors["float"].add_(1)
    other.tensors["scalar"].add_(1)
    assert memory.tensors["float"].tolist() == [1, 2, 3, 4, 5]
    assert int(memory.tensors["scalar"]) == 8
    memory.close()


@pytest.mark.parametrize(
    ("name", "momentum", "message"),
    [
        ("sdg", 0.0, "did you mean 'sgd'?"),
        ("lbfgs", 0.0, "'lbfgs' is not one that can be used"),
        ("adam", 0.9, "momentum: optimizer adam has none"),
        ("nowhere:Optimizer", 0.0, "'nowhere:Optimizer' cannot be imported"),
        ("math:pi", 0.0, "'math:pi' is nothing that can be called"),
    ],
)
def test_an_optimizer_that_cannot_be_used_is_refused(name: str, momentum: float, message: str):
    with pytest.raises(InvalidInput) as raised:
        optimizer_of(name, 0.1, momentum)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("size", "staleness", "decay", "factor"),
    [(64, 0, 0.0, 1.0), (16, 0, 0.0, 0.25), (128, 9, 0.0, 2.0), (64, 3, 1.0, 0.25)],
)
def test_the_learning_rate_follows_the_batch_and_its_staleness(size, staleness, decay, factor):
    assert rate_factor(size, 64, staleness, decay) == factor


def test_a_replica_is_no_copy_of_the_model(shared):
    model = refer(copy.deepcopy(net()), shared.tensors)
    with torch.no_grad():
        shared.tensors["0.weight"].zero_()
    assert not dict(model.named_parameters())["0.weight"].any()
