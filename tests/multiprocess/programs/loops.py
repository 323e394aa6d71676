"""Cases of what a user's own loop does between and during backward passes."""

import torch
from graphs import Branches, Net
from torch import Tensor, nn

from ranks import (
    Place,
    batch,
    bits,
    case,
    distance,
    quick,
    settled,
    sgd,
    square,
    trained,
)


def _accumulated(place: Place, early: str, late: str, micro_batches: int = 3, **options):
    """Train with micro-batches; all but the last of a step use the layers `early`, it `late`."""

    def loss(model: nn.Module, rank: int, step: int, number: int) -> Tensor:
        layers = late if number == micro_batches - 1 else early
        return model(batch(rank, 10 * step + number), layers).square().mean() / micro_batches

    module, oracle = place.build(Net)
    parallel = place.parallel(module, **options)
    optimizers = sgd(parallel), sgd(oracle)
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        with parallel.no_sync():
            for number in range(micro_batches - 1):
                loss(parallel, place.rank, step, number).backward()
        loss(parallel, place.rank, step, micro_batches - 1).backward()
        for number in range(micro_batches):
            place.mean(lambda m, r, s, n=number: loss(m, r, s, n), oracle, step).backward()
        for optimizer in optimizers:
            optimizer.step()
    return settled(parallel, oracle)


@case
def no_sync(place: Place):
    return _accumulated(place, "abc", "abc")


@quick
def no_sync_before_an_exchange_is_chosen(place: Place):
    module, oracle = place.build(Net)
    parallel = place.parallel(module, exchange="auto", chunk="auto")
    optimizers = sgd(parallel), sgd(oracle)
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        with parallel.no_sync():
            square(parallel, place.rank, 2 * step).backward()
        square(parallel, place.rank, 2 * step + 1).backward()
        for half in (0, 1):
            place.mean(square, oracle, 2 * step + half).backward()
        for optimizer in optimizers:
            optimizer.step()
    return settled(parallel, oracle)


@quick
def no_sync_with_layers_of_early_micro_batches_alone(place: Place):
    return _accumulated(place, "abc", "bc", find_unused_parameters=True)


@quick
def no_sync_with_layers_of_the_last_micro_batch_alone(place: Place):
    return _accumulated(place, "ab", "abc")


@case
def gradients_kept_between_steps(place: Place):
    """Without zero_grad the means of all steps add up, as with DistributedDataParallel."""
    module, oracle = place.build(Net)
    parallel = place.parallel(module)
    optimizers = sgd(parallel), sgd(oracle)
    for step in range(5):
        square(parallel, place.rank, step).backward()
        place.mean(square, oracle, step).backward()
        for optimizer in optimizers:
            optimizer.step()
    return settled(parallel, oracle)


@quick
def no_sync_on_top_of_kept_gradients(place: Place):
    module, oracle = place.build(Net)
    parallel = place.parallel(module)
    optimizers = sgd(parallel), sgd(oracle)
    for step in range(4):
        with parallel.no_sync():
            square(parallel, place.rank, 50 + step).backward()
        square(parallel, place.rank, step).backward()
        for number in 50 + step, step:
            place.mean(square, oracle, number).backward()
        for optimizer in optimizers:
            optimizer.step()
    return settled(parallel, oracle)


@case
def gradients_set_to_zero(place: Place):
    module, oracle = place.build(Net)
    parallel = place.parallel(module)
    optimizers = sgd(parallel), sgd(oracle)
    for step in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=False)
        square(parallel, place.rank, step).backward()
        place.mean(square, oracle, step).backward()
        for optimizer in optimizers:
            optimizer.step()
    return settled(parallel, oracle)


@case
def clipping(place: Place):
    module, oracle = place.build(Net)
    parallel = place.parallel(module)
    optimizers = sgd(parallel), sgd(oracle)
    norms = []
    for step in range(7):
        for optimizer in optimizers:
            optimizer.zero_grad()
        square(parallel, place.rank, step).backward()
        place.mean(square, oracle, step).backward()
        for model in parallel, oracle:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        norms.append(float(norm))
        for optimizer in optimizers:
            optimizer.step()
    return settled(parallel, oracle, least_norm=min(norms))


@case
def clipping_every_other_step(place: Place):
    """What was written into a result must not be seen in a later one."""
    module, oracle = place.build(Net)
    parallel = place.parallel(module)
    optimizers = sgd(parallel), sgd(oracle)
    for step in range(9):
        for optimizer in optimizers:
            optimizer.zero_grad()
        square(parallel, place.rank, step).backward()
        place.mean(square, oracle, step).backward()
        if step % 3 == 1:
            for model in parallel, oracle:
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        for optimizer in optimizers:
            optimizer.step()
    return settled(parallel, oracle)


@case
def eval_mode_that_trains(place: Place):
    """A user who fine-tunes without dropout calls eval(), and still wants gradients exchanged."""

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        return square(model.eval(), rank, step)

    return trained(place, lambda: nn.Sequential(Net(), nn.Dropout(0.5).double(), Net()), loss)


@case
def evaluation_between_steps(place: Place):
    """Ranks evaluate as often as they like, with and without gradients of the inputs."""

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        if step == 1:
            model.eval()
            with torch.no_grad():
                for _ in range(1 + place.rank):
                    model(batch(rank, 99))
            model.train()
        return square(model, rank, step)

    return trained(place, Net, loss)


@case
def a_forward_without_backward(place: Place):
    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        if step == 1:
            model(batch(rank, 99))
        return square(model, rank, step)

    return trained(place, Net, loss)


@quick
def two_models_and_one_loss(place: Place):
    return _two_models(place, "ab")


@quick
def two_models_whose_order_differs_between_ranks(place: Place):
    return _two_models(place, "ba" if place.rank else "ab")


def _two_models(place: Place, order: str):
    (first, oracle_a), (second, oracle_b) = place.build(Net), place.build(Branches)
    models = {"a": place.parallel(first), "b": place.parallel(second)}
    oracles = {"a": oracle_a, "b": oracle_b}
    both, reference = nn.ModuleDict(models), nn.ModuleDict(oracles)
    optimizers = sgd(both), sgd(reference)

    def loss(pair: nn.ModuleDict, rank: int, step: int, order: str) -> Tensor:
        outputs = {name: pair[name](batch(rank, step)) for name in order}
        return (outputs["a"] * outputs["b"]).mean()

    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss(both, place.rank, step, order).backward()
        place.mean(lambda m, r, s: loss(m, r, s, "ab"), reference, step).backward()
        for optimizer in optimizers:
            optimizer.step()
    return settled(both, reference)


@case
def two_models_that_take_turns(place: Place):
    """As in adversarial training: each has its own loss, optimizer and steps."""
    (first, oracle_a), (second, oracle_b) = place.build(Net), place.build(Branches)
    pairs = [(place.parallel(first), oracle_a), (place.parallel(second), oracle_b)]
    optimizers = [(sgd(model), sgd(oracle)) for model, oracle in pairs]
    for step in range(6):
        (model, oracle), own = pairs[step % 2], optimizers[step % 2]
        for optimizer in own:
            optimizer.zero_grad()
        square(model, place.rank, step).backward()
        place.mean(square, oracle, step).backward()
        for optimizer in own:
            optimizer.step()
    worst = [
        distance(*pair)
        for model, oracle in pairs
        for pair in zip(model.parameters(), oracle.parameters(), strict=True)
    ]
    return {"worst": max(worst), "bits": "".join(bits(model) for model, _ in pairs)}
