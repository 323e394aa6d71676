"""Training with encoded gradients: DistributedDataParallel with our hook, and DataParallel."""

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import codec_training
import paceline
from codec_training import (
    WAITING,
    Build,
    Place,
    check_poisoned,
    compared,
    loss_of,
    momentum,
    network,
    same,
    trained,
)
from faults import failpoints
from paceline.exchange.all_reduce import HookState
from paceline.links.failpoints import reach
from pair import RankFailed, Ranks
from refusals import refused

slow = pytest.mark.slow
TINY_MB = 1e-3  # so that each larger parameter has its own bucket after the first step
LOST_S = 3.0


def hooked(
    place: Place, codec: str, make: Build = network, **options: Any
) -> tuple[DistributedDataParallel, HookState]:
    """Return a model in DistributedDataParallel with our hook, and the hook's state."""
    module, _ = place.build(make)
    parallel = DistributedDataParallel(module, **options)
    group = options.get("process_group")
    state, hook = paceline.ddp_hook(codec, process_group=group, deadline_s=place.deadline_s)
    parallel.register_comm_hook(state, hook)
    return parallel, state


def case(name: str) -> dict[str, Any]:
    """Run a case that this file and the tests on two hosts share."""
    return codec_training.CASES[name](Place.here(deadline_s=2.0 if name in WAITING else 20.0))


def right_by_hook() -> dict[str, Any]:
    place = Place.here()
    parallel, _ = hooked(place, "dynamic8", gradient_as_bucket_view=True)
    return compared(place, parallel, "dynamic8")


def test_exchange_allreduce_has_the_same_bits_as_the_hook(pair: Ranks):
    outcome = same(pair(case, "right_gradients"))
    by_hook = same(pair(right_by_hook))
    assert 0.05 < by_hook["worst"] <= 1
    assert outcome["bits"] == by_hook["bits"]
    assert outcome["codec"].startswith("dynamic8/1024: ")
    whole = 4 * 16_549  # a ring's bytes of float32 with two ranks
    shares = [sent / (step * whole) for step, sent in enumerate(outcome["sent"], 1)]
    assert shares == pytest.approx([0.25] * 5, rel=0.02)


def in_a_group() -> float:
    """All ranks except the first train together; the first rank trains alone."""
    groups = [dist.new_group([0]), dist.new_group([1, 2])]
    own, rank = groups[min(dist.get_rank(), 1)], max(dist.get_rank() - 1, 0)
    members = Place(rank, dist.get_world_size(own))
    parallel, _ = hooked(members, "dynamic8", process_group=own, bucket_cap_mb=TINY_MB)
    return compared(members, parallel, "dynamic8")["worst"]


def in_bfloat16() -> None:
    place = Place.here()
    parallel, _ = hooked(place, "dynamic8", lambda: network().bfloat16(), bucket_cap_mb=TINY_MB)
    outcome = compared(place, parallel, "dynamic8", accumulates=False)
    assert outcome["worst"] <= 1
    assert {parameter.grad.dtype for parameter in parallel.parameters()} == {torch.bfloat16}


@slow
def test_groups_of_some_ranks_and_bfloat16_are_trained_too(triple: Ranks):
    first, *others = triple(in_a_group)
    assert 0.05 < first <= 1
    assert 0.05 < same(others) <= 1
    triple(in_bfloat16)


def codec_on_rank(codecs: list[str]) -> str:
    """Use a different codec on each rank; return the error's problem."""
    before = threading.active_count()
    with refused("codec") as caught:
        paceline.ddp_hook(codecs[dist.get_rank()], deadline_s=2.0)
    assert threading.active_count() == before
    return caught.value.problem


def test_unsupported_codecs_are_refused_on_all_ranks(pair: Ranks):
    for name in ("float64", "other_codecs"):
        for failure in pair(case, name, errors=True):
            assert (failure.kind, failure.fields["field"]) == ("InvalidInput", "codec")
    for codecs in (["half", "dynamic8"], ["auto", "dynamic8"]):
        for rank, problem in enumerate(pair(codec_on_rank, codecs)):
            assert f"rank {1 - rank} " in problem


def buckets_made_anew() -> None:
    """Rebuild the bucket in another order, and backpropagate zeros."""
    place = Place.here()
    parallel, state = hooked(place, "onebit")
    loss_of(parallel, place.rank, 0).backward()
    errors = state.codecs.state_dict().values()
    assert max(float(error.abs().max()) for error in errors) > 0.01
    parallel.zero_grad()
    (loss_of(parallel, place.rank, 0) * 0).backward()
    assert max(float(one.grad.abs().max()) for one in parallel.parameters()) == 0


@slow
def test_the_error_feedback_of_an_old_bucket_is_dropped(pair: Ranks):
    pair(buckets_made_anew)


@pytest.mark.parametrize(
    ("name", "raising", "num_skipped"),
    [("nan_raises_by_default", [0, 1], 0), ("infinity_is_skipped", [], 1)],
)
def test_non_finite_gradients_raise_or_are_skipped_on_all_ranks(
    pair: Ranks, name: str, raising: list[int], num_skipped: int
):
    outcomes = pair(case, name)
    check_poisoned(outcomes, raising, num_skipped)
    assert outcomes[0]["num_nonfinite"] == 1


def host_on_one_machine() -> None:
    """Train on one machine: `host` sends nothing between machines and encodes nothing."""
    place, digests = Place.here(exchange="host"), set()
    for codec in (None, "onebit"):
        module, _ = place.build(network)
        parallel = place.parallel(module, codec=codec)
        digests.add(trained(place, parallel, momentum(parallel), range(3)))
        assert parallel.statistics().codec is None
    assert len(digests) == 1


def test_the_host_of_one_machine_encodes_nothing(pair: Ranks):
    pair(host_on_one_machine)


def trains_until_stopped() -> None:
    place = Place.here(deadline_s=LOST_S)
    module, _ = place.build(network)
    parallel = place.parallel(module, codec="dynamic8")
    optimizer, now = momentum(parallel), {"step": 0}
    module[4].weight.register_hook(
        lambda gradient: reach("test.backward", rank=place.rank, step=now["step"])
    )
    for now["step"] in range(100):
        optimizer.zero_grad()
        loss_of(parallel, place.rank, now["step"]).backward()
        optimizer.step()


@slow
def test_when_a_rank_stops_the_others_raise(triple: Ranks):
    stopped = {"at": "test.backward", "rank": 1, "step": 5, "do": "SIGSTOP"}
    with failpoints(stopped), pytest.raises(RankFailed) as caught:
        triple(trains_until_stopped, deadline_s=3 * LOST_S)
    hanging = [f"rank {rank} hangs" in str(caught.value) for rank in range(3)]
    assert hanging == [False, True, False]
