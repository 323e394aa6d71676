"""Local updates on a pair of ranks, compared with naive averaging; and faults."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import paceline
from refusals import refused
from rounds import STEP, InFragments, adamw, inner_step, loop, loss_of, naive, net, of_torch, vector


def trained(num_steps: list[int], options: list[dict[str, Any]], weighs: bool = False) -> Tensor:
    rank = dist.get_rank()
    model, optimizers, step = loop(rank)
    with paceline.LocalUpdates(model, optimizers, **options[rank]) as updates:
        for number in range(num_steps[rank]):
            updates.weight = weight_of(rank, number) if weighs else 1.0
            step(number)
    return vector(model)


def weight_of(rank: int, number: int) -> float:
    """Return a weight that differs by rank and step, so that a lost weight changes the mean."""
    return 1.0 + rank * number


@pytest.mark.parametrize(
    ("num_steps", "sync_every", "option"),
    [
        ([12, 12], [4, 4], STEP),
        ([12, 12], [4, 4], {"outer": of_torch}),
        ([12, 6], [4, 2], STEP),
        ([10, 10], [4, 4], STEP),
    ],
)
def test_outer_steps_are_those_of_a_naive_version(
    pair: Any, num_steps: list[int], sync_every: list[int], option: dict[str, Any]
) -> None:
    options = [{"sync_every": every, **option} for every in sync_every]
    first, second = pair(trained, num_steps, options)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, naive(num_steps, sync_every))


@pytest.mark.parametrize(
    ("count", "delay", "mixing"),
    [(2, 0, 0.0), (3, 1, 0.0), (1, 2, 0.25), (2, 2, 0.5), (2, 0, None), (2, 2, None)],
)
def test_fragments_delay_and_mixing_are_those_of_a_naive_version(
    pair: Any, count: int, delay: int, mixing: float | None
) -> None:
    option = {"sync_every": 6, "fragments": count, "delay": delay, "mixing": mixing, **STEP}
    found = pair(trained, [18, 18], [option, option])
    assert torch.equal(*found)
    torch.testing.assert_close(found[0], InFragments(6, count, delay, mixing).train(18))


@pytest.mark.parametrize("codec", ["dynamic8", "dynamic4", "e3m0+feedback", "threshold:0.03"])
def test_encoded_replicas_are_bit_equal_and_near_the_exact_mean(pair: Any, codec: str) -> None:
    option = {"sync_every": 4, "fragments": 2, "codec": codec, **STEP}
    first, second = pair(trained, [16, 16], [option, option])
    assert torch.equal(first, second)
    exact = pair(trained, [16, 16], [option | {"codec": None}] * 2)[0]
    error = float((first - exact).norm() / (exact - vector(net())).norm())
    bound = 0.8 if "threshold" in codec else 0.2  # a threshold codec sends 0.03 or nothing
    assert 0 < error < bound


def sent_bytes() -> int:
    model = nn.Linear(256, 128)
    optimizer = adamw(model)
    with paceline.LocalUpdates(model, optimizer, 1, codec="dynamic4") as updates:
        mse_loss(model(torch.ones(1, 256)), torch.zeros(1, 128)).backward()
        optimizer.step()
    return updates.statistics().bytes_sent


def test_two_workers_each_send_all_values_in_4_bits(pair: Any) -> None:
    count = 257 * 128
    blocks = -(-count // 1024)  # each with a scale of four bytes
    assert pair(sent_bytes)[0] == pytest.approx(count / 2 + 4 * blocks, abs=64)


def weighted() -> Tensor:
    rank = dist.get_rank()
    model, optimizers, step = loop(rank)
    with paceline.LocalUpdates(model, optimizers, 4, outer="average") as updates:
        for number in range(4):
            updates.weight = [3.0, 1.0][rank]
            step(number)
    return vector(model)


def alone(worker: int) -> Tensor:
    """Take four steps without LocalUpdates."""
    model, _, step = loop(worker)
    for number in range(4):
        step(number)
    return vector(model)


def test_the_mean_is_weighted_by_the_samples_of_steps(pair: Any) -> None:
    torch.testing.assert_close(pair(weighted)[1], 0.75 * alone(0) + 0.25 * alone(1))


def saved(folder: str, num_steps: int, options: list[dict[str, Any]], ends: bool) -> None:
    """Train, and save within a round or, if `ends`, at the end."""
    rank = dist.get_rank()
    model, optimizers, step = loop(rank)
    updates = paceline.LocalUpdates(model, optimizers, **options[rank])
    for number in range(num_steps):
        updates.weight = weight_of(rank, number)
        step(number)
    if ends:
        updates.close()
    parts = {"updates": updates, "model": model, "optimizer": optimizers[0]}
    torch.save({name: part.state_dict() for name, part in parts.items()}, f"{folder}/{rank}")
    updates.close()


def resumed(path: str, num_steps: int, options: list[dict[str, Any]]) -> tuple[Tensor, int]:
    """Train up to this step from a saved state; return the parameters and number of exchanges."""
    rank = dist.get_rank()
    model = net(seed=1)
    optimizer = adamw(model)
    state = torch.load(path.format(rank=rank), weights_only=True)
    with paceline.LocalUpdates(model, optimizer, **options[rank]) as updates:
        for name, part in (("updates", updates), ("model", model), ("optimizer", optimizer)):
            part.load_state_dict(state[name])
        sent_before = updates.num_exchanges
        for number in range(updates.num_steps, num_steps):
            updates.weight = weight_of(rank, number)
            inner_step(model, optimizer, rank, number)
        sent = updates.num_exchanges - sent_before
    return vector(model), sent


@pytest.mark.parametrize("at", [3, 4, 6, 8])
@pytest.mark.parametrize("codec", [None, "e3m0+feedback"])
def test_a_saved_state_resumes_bit_for_bit_even_while_a_fragment_travels(
    pair: Any, tmp_path: Any, at: int, codec: str | None
) -> None:
    options = [{"sync_every": 6, "fragments": 2, "delay": 2, "codec": codec, **STEP}] * 2
    pair(saved, str(tmp_path), at, options, False)
    found = pair(resumed, f"{tmp_path}/{{rank}}", 14, options)
    expected = pair(trained, [14, 14], options, True)
    assert all(torch.equal(own, other) for (own, _), other in zip(found, expected, strict=True))


@pytest.mark.parametrize("ends", [False, True])
def test_more_workers_continue_from_the_state_of_the_first(
    pair: Any, triple: Any, tmp_path: Any, ends: bool
) -> None:
    option = {"sync_every": 6, "fragments": 2, "codec": "onebit"}
    pair(saved, str(tmp_path), 8, [option] * 2, ends)
    found = triple(resumed, f"{tmp_path}/0", 20, [option] * 3)
    assert all(torch.equal(one, found[0][0]) for one, _ in found)
    assert not torch.equal(found[0][0], vector(net()))


def test_a_state_that_is_saved_after_the_end_names_its_own_worker(pair: Any, tmp_path: Any) -> None:
    pair(saved, str(tmp_path), 8, [{"sync_every": 4}] * 2, True)
    states = [torch.load(tmp_path / str(rank), weights_only=True) for rank in (0, 1)]
    assert [one["updates"]["own"]["worker"][0] for one in states] == [0, 1]


def test_a_worker_with_a_shorter_round_than_the_saved_one_exchanges(
    pair: Any, tmp_path: Any
) -> None:
    pair(saved, str(tmp_path), 6, [{"sync_every": 8}] * 2, False)
    options = [{"sync_every": 8}, {"sync_every": 4}]
    found = pair(resumed, f"{tmp_path}/0", 14, options)
    assert torch.equal(found[0][0], found[1][0])
    assert [sent for _, sent in found] == [1, 2]


def beginning_differently() -> tuple[Tensor, Tensor]:
    model = net(dist.get_rank())
    updates = paceline.LocalUpdates(model, adamw(model), 4)
    begun = vector(model)
    updates.close()
    return begun, vector(model)


def test_all_workers_begin_with_the_parameters_of_the_first(pair: Any) -> None:
    assert all(
        torch.equal(one, vector(net(0))) for found in pair(beginning_differently) for one in found
    )


def with_nan(all_of_them: bool) -> tuple[Tensor, bool]:
    rank = dist.get_rank()
    model, optimizers, step = loop(rank)
    with paceline.LocalUpdates(model, optimizers, 4, outer="average"):
        for number in range(4):
            if number == 2 and (rank == 1 or all_of_them):
                with torch.no_grad():
                    model[0].weight.fill_(math.nan)
            step(number)
        begun_anew = not optimizers[0].state
    return vector(model), begun_anew


def test_a_worker_with_nan_is_left_out_and_takes_the_groups(pair: Any) -> None:
    (first, kept), (second, begun_anew) = pair(with_nan, False)
    torch.testing.assert_close(first, alone(0))
    assert torch.equal(first, second)
    assert begun_anew
    assert not kept


def test_nan_everywhere_is_the_learning_rates_fault(pair: Any) -> None:
    failures = pair(with_nan, True, errors=True)
    assert [one.fields["field"] for one in failures] == ["learning_rate"] * 2


def with_other_bits() -> Tensor:
    rank = dist.get_rank()
    model, optimizers, step = loop(rank)
    with paceline.LocalUpdates(model, optimizers, 4) as updates:
        for number in range(12):
            step(number)
            if number == 4 and rank == 1:
                updates._outer.momenta[0][7] += 1e-3
                updates._averaging.digest = updates._outer.digest(0)
    return vector(model)


def test_a_worker_with_another_outer_model_adopts_that_of_the_first(pair: Any) -> None:
    first, second = pair(with_other_bits)
    assert torch.equal(first, second)
    option = {"sync_every": 4}
    assert torch.equal(first, pair(trained, [12, 12], [option, option])[0])


def other_settings(name: str, values: list[Any]) -> None:
    model = net()
    paceline.LocalUpdates(model, adamw(model), 8, **{name: values[dist.get_rank()]})


@pytest.mark.parametrize(
    ("name", "values"),
    [("codec", ["dynamic8", None]), ("fragments", [2, 1]), ("outer", ["average", "auto"])],
)
def test_other_settings_on_another_worker_are_refused(
    pair: Any, name: str, values: list[Any]
) -> None:
    failures = pair(other_settings, name, values, errors=True)
    assert [one.fields["field"] for one in failures] == [name] * 2


@pytest.mark.parametrize(
    ("option", "field"),
    [
        ({"sync_every": 0}, "sync_every"),
        ({"fragments": 4}, "fragments"),
        ({"sync_every": 2, "fragments": 3}, "fragments"),
        ({"sync_every": 4, "delay": 4}, "delay"),
        ({"codec": "dynamic9"}, "codec"),
        ({"codec": "auto"}, "codec"),
        ({"outer": "adam"}, "outer"),
        ({"mixing": 1.0}, "mixing"),
    ],
)
def test_a_wrong_setting_is_refused(option: dict[str, Any], field: str) -> None:
    model = net()
    with refused(field):
        paceline.LocalUpdates(model, adamw(model), **option)


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    model, other = net(), net()
    for parameters in (list(model[0].parameters()), [*model.parameters(), *other.parameters()]):
        with refused("optimizer"):
            paceline.LocalUpdates(model, torch.optim.SGD(parameters, 0.1))


def twice(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    inner_step(model, optimizer, 0, 0)
    optimizer.step()


def never(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    inner_step(model, adamw(model), 0, 0)


def with_a_group_more(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    inner_step(model, optimizer, 0, 0)


@pytest.mark.parametrize("misuse", [twice, never, with_a_group_more])
def test_a_misused_optimizer_is_refused(misuse: Any) -> None:
    model = net()
    optimizer = adamw(model)
    with refused("optimizer"), paceline.LocalUpdates(model, optimizer):
        misuse(model, optimizer)


def test_a_step_that_one_of_two_optimizers_skips_counts() -> None:
    model = net()
    optimizers = [torch.optim.SGD(layer.parameters(), 0.1) for layer in (model[:2], model[2:])]
    with paceline.LocalUpdates(model, optimizers) as updates:
        for step in range(3):
            loss_of(model, 0, step).backward()
            for one in optimizers[:1] if step == 1 else optimizers:
                one.step()
        assert updates.num_steps == 3


def test_accumulated_gradients_are_no_second_step() -> None:
    model = net()
    optimizer = adamw(model)
    with paceline.LocalUpdates(model, optimizer, 2) as updates:
        for step in range(3):
            optimizer.zero_grad(set_to_none=step == 1)
            for micro in range(2):
                loss_of(model, 0, 2 * step + micro).backward()
            optimizer.step()
        assert updates.num_steps == 3
    assert not optimizer._optimizer_step_post_hooks


class Raising(torch.optim.SGD):
    """An optimizer whose step calls that of its base class, and can fail afterwards."""

    is_full = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        if self.is_full:
            raise MemoryError


def test_steps_of_a_subclass_count_once_even_after_one_that_raised() -> None:
    model = net()
    torch.optim.SGD(model.parameters(), 0.1)  # from now on the base's steps have hooks, too
    optimizer = Raising(model.parameters(), 0.1)
    with paceline.LocalUpdates(model, optimizer, 2) as updates:
        inner_step(model, optimizer, 0, 0)
        optimizer.is_full = True
        with pytest.raises(MemoryError):
            inner_step(model, optimizer, 0, 1)
        optimizer.is_full = False
        inner_step(model, optimizer, 0, 2)
        assert updates.num_steps == 2


def test_a_single_process_trains_as_without_local_updates() -> None:
    model, optimizers, step = loop(0)
    with paceline.LocalUpdates(model, optimizers, 2):
        for number in range(4):
            step(number)
    torch.testing.assert_close(vector(model), alone(0))
