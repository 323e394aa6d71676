"""Cases of the parallel module as an object: copied, saved, compiled, nested, looked at."""

import copy
import io
import pickle

import torch
from graphs import Net
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ranks import (
    Place,
    batch,
    bits,
    case,
    distance,
    oracle_of,
    settled,
    sgd,
    square,
)


def _train(place: Place, parallel: nn.Module, oracle: nn.Module, first: int, steps: int):
    optimizers = sgd(parallel), sgd(oracle)
    for step in range(first, first + steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        square(parallel, place.rank, step).backward()
        place.mean(square, oracle, step).backward()
        for optimizer in optimizers:
            optimizer.step()
    return settled(parallel, oracle)


@case
def a_copy_trained_further(place: Place):
    module, oracle = place.build(Net)
    parallel = place.parallel(module)
    _train(place, parallel, oracle, 0, 3)
    return _train(place, copy.deepcopy(parallel), oracle, 3, 3)


@case
def the_original_of_a_copy_trained_further(place: Place):
    module, oracle = place.build(Net)
    parallel = place.parallel(module)
    _train(place, parallel, oracle, 0, 3)
    copied, other = copy.deepcopy(parallel), oracle_of(oracle)
    _train(place, copied, other, 7, 2)
    outcome = _train(place, parallel, oracle, 3, 3)
    again = _train(place, copied, other, 9, 2)
    return outcome | {"worst": max(outcome["worst"], again["worst"])}


@case
def a_copy_made_before_training_in_eval_mode(place: Place):
    """The copy's first training step is one without train(): it must be exchanged, too."""
    module, oracle = place.build(Net)
    copied = copy.deepcopy(place.parallel(module)).eval()
    return _train(place, copied, oracle, 0, 3)


@case
def a_copy_of_a_module_that_was_given_up(place: Place):
    """An average of weights, as torch's AveragedModel keeps it, exchanges nothing."""
    module, oracle = place.build(Net)
    parallel = place.parallel(module)
    averages = [torch.optim.swa_utils.AveragedModel(model) for model in (parallel, oracle)]
    for step in range(4):
        _train(place, parallel, oracle, step, 1)
        for average, model in zip(averages, (parallel, oracle), strict=True):
            average.update_parameters(model)
    inputs = batch(0, 99)
    with torch.no_grad():
        worst = distance(averages[0](inputs), averages[1](inputs))
    return {"worst": worst, "bits": bits(averages[0])}


@case
def state_dict_round_trip(place: Place):
    module, oracle = place.build(Net)
    parallel = place.parallel(module)
    _train(place, parallel, oracle, 0, 2)
    saved = {name: value.clone() for name, value in parallel.state_dict().items()}
    _train(place, parallel, oracle_of(oracle), 2, 2)
    parallel.load_state_dict(saved)
    return _train(place, parallel, oracle, 4, 2) | {
        "names": list(saved) == [f"module.{name}" for name in module.state_dict()],
        "plain": _loads(parallel, module.state_dict()) and _loads(nn.Sequential(parallel), saved),
    }


@case
def state_loaded_by_swapping_tensors(place: Place):
    """The parameters stay, but all that torch knows of them is another tensor's: hooks, too."""
    module, oracle = place.build(Net)
    parallel = place.parallel(module)
    _train(place, parallel, oracle, 0, 2)
    saved = {name: value.clone() for name, value in parallel.state_dict().items()}
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        parallel.load_state_dict(saved)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    return _train(place, parallel, oracle, 2, 3)


def _loads(model: nn.Module, state: dict[str, Tensor]) -> bool:
    missing, unexpected = model.load_state_dict(
        {("0." * isinstance(model, nn.Sequential)) + name: value for name, value in state.items()}
    )
    return not missing and not unexpected


@case
def nested_in_a_parent(place: Place):
    class Parent(nn.Module):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net, self.other = net, nn.BatchNorm1d(3)

    module, oracle = place.build(Net)
    parallel, alone = Parent(place.parallel(module)), Parent(oracle_of(oracle))
    _train(place, parallel.net, oracle, 0, 2)
    state = {name: value.clone() for name, value in parallel.state_dict().items()}
    alone.load_state_dict({name.replace("module.", ""): one for name, one in state.items()})
    parallel.load_state_dict(alone.state_dict())
    return settled(
        parallel.net,
        alone.net,
        trained=distance(alone.net.a.weight, oracle.a.weight),
    )


@case
def pickled(place: Place):
    """On all ranks, and then trained further; one rank alone may look at its own."""
    module, oracle = place.build(Net)
    parallel = place.parallel(module)
    _train(place, parallel, oracle, 0, 2)
    file = io.BytesIO()
    torch.save(parallel, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    if place.rank == 0:
        pickle.loads(pickle.dumps(loaded))
    return _train(place, loaded, oracle, 2, 3)


@case
def compiled_before(place: Place):
    """The whole model is compiled: all hooks fire only after the backward pass."""
    module, oracle = place.build(Net)
    parallel = place.parallel(torch.compile(module, backend="aot_eager"))
    return _train(place, parallel, oracle, 0, 3)


@case
def compiled_after(place: Place):
    module, oracle = place.build(Net)
    parallel = place.parallel(module)
    compiled = torch.compile(parallel, backend="aot_eager")
    return _train(place, compiled, oracle, 0, 3)


@case
def compiled_by_blocks(place: Place):
    module, oracle = place.build(Net)
    for name in "abc":
        setattr(module, name, torch.compile(getattr(module, name), backend="aot_eager"))
    return _train(place, place.parallel(module), oracle, 0, 3)


@case
def buffers_as_in_ddp(place: Place):
    def make() -> nn.Module:
        return nn.Sequential(
            nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 4), nn.BatchNorm1d(4)
        ).double()

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        return (model(batch(rank, step)) - 1).pow(4).mean()

    (module, _), (other, _) = place.build(make), place.build(make)
    models = place.parallel(module), DistributedDataParallel(other)
    for model in models:
        optimizer = sgd(model)
        for step in range(4):
            optimizer.zero_grad()
            loss(model, place.rank, step).backward()
            optimizer.step()
    worst = max(
        distance(one, two)
        for one, two in zip(module.state_dict().values(), other.state_dict().values(), strict=True)
    )
    return {"worst": worst, "bits": bits(module), "own": bits(module.buffers())}


@case
def buffers_of_several_types(place: Place):
    class Counting(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))
            self.register_buffer("sums", torch.zeros(2, 3).t())

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            self.sums += x[:3, :2].detach().float()
            return super().forward(x)

    (module, _), (other, _) = place.build(Counting), place.build(Counting)
    for model in place.parallel(module), DistributedDataParallel(other):
        for step in range(4):
            square(model, place.rank, step).backward()
    same = [torch.equal(*pair) for pair in zip(module.buffers(), other.buffers(), strict=True)]
    return {"same": same}


@case
def statistics_and_timeline(place: Place):
    module, oracle = place.build(Net)
    parallel = place.parallel(module)
    _train(place, parallel, oracle, 0, 5)
    statistics, timeline = parallel.statistics(), parallel.timeline()
    starts = [span.start_s for span in timeline.spans]
    return {
        "statistics": vars(statistics),
        "origin": timeline.origin,
        "start": min(starts, default=0.0),
        "backwards": sum(span.end_s < span.start_s for span in timeline.spans),
        "kinds": sorted({str(span.kind.value) for span in timeline.spans}),
        "steps": timeline.num_steps() if timeline.spans else 0,
        "gradient_bytes": sum(p.nbytes for p in parallel.parameters()),
        "why": parallel.why,
    }


@case
def closed(place: Place):
    """After close a rank trains alone, and keeps its last gradients."""
    module, oracle = place.build(Net)
    parallel = place.parallel(module)
    _train(place, parallel, oracle, 0, 3)
    before = [None if p.grad is None else p.grad.clone() for p in parallel.parameters()]
    parallel.close()
    parallel.close()
    kept = all(
        one is None or torch.equal(one, p.grad)
        for one, p in zip(before, parallel.parameters(), strict=True)
    )
    alone = oracle_of(oracle)
    for model in parallel, alone:
        model.zero_grad()
        square(model, place.rank, 9).backward()
    worst = max(
        distance(one.grad, two.grad)
        for one, two in zip(parallel.parameters(), alone.parameters(), strict=True)
    )
    return {"worst": worst, "bits": "", "kept": kept}
