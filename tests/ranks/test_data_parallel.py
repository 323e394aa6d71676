"""Features of paceline.DataParallel that DDP lacks; test_programs.py compares the others."""

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline import DataParallel
from paceline.codecs.feedback import OneBit
from paceline.core.plan import Kind
from paceline.exchange.trials import Trials
from paceline.exchange.trying import Trying
from paceline.links.rendezvous import joined
from paceline.record.recorder import Recorder
from paceline.strategies import find_strategy
from pair import Ranks
from refusals import refused
from replicas import (
    EXCHANGES,
    MARKED,
    Net,
    batch,
    build,
    check,
    distance,
    each_place,
    parallel_of,
    square,
    train,
)
from ticking import Ticking


def learned(exchange: str, chunk: int | str, num_steps: int) -> tuple[str, list[Any], str]:
    """Train, compare with one process; return bits, [tried chunks, exchange], reason."""
    module, oracle = build(Net)
    parallel = parallel_of(module, exchange, chunk=chunk)
    train(parallel, oracle, range(num_steps))
    chosen = [[trial.chunk for trial in parallel.trials], parallel.statistics().exchange]
    return check(parallel, oracle), chosen, parallel.why


@pytest.mark.parametrize(
    ("place", "num_steps", "more"),
    [
        ("pair", 50, [("tree", 1)]),
        pytest.param("pair_on_gpus", 10, [], marks=pytest.mark.slow),
    ],
)
def test_chunks_and_exchanges_give_the_same_bits(ranks: Ranks, num_steps: int, more):
    settings = [("host", chunk) for chunk in (1, 2, 100, "auto")] + more
    found = {one: ranks(learned, *one, num_steps, deadline_s=120) for one in settings}
    assert len({own for ranks in found.values() for own, _, _ in ranks}) == 1
    (_, (tried, exchange), why), (_, _, others) = found["host", "auto"]
    assert (exchange, why) == ("host", others)
    assert len(set(tried)) == len(tried)
    assert tried or num_steps < 50


def test_all_ranks_choose_the_same_exchange(pair: Ranks):
    (bits, (_, exchange), why), second = pair(learned, "auto", "auto", 50)
    assert (bits, exchange, why) == (second[0], second[1][1], second[2])
    assert why.startswith(f"{exchange}: ")


def chosen_again(num_before: int, num_after: int) -> list[str]:
    """Slow down DDP's reducer after it was chosen; return the exchanges before and after."""
    module, oracle = build(Net)
    parallel = parallel_of(module, "auto", chunk=1)
    seconds, found = {"allreduce": 0.01, "tree": 0.02, "host": 0.02}, []
    assert parallel._trials is not None
    clock = parallel._trials._clock = Ticking()

    def before(step: int) -> None:
        clock.now += seconds[parallel._method.name]

    for first, last in ((0, num_before), (num_before, num_before + num_after)):
        train(parallel, oracle, range(first, last), before)
        found.append(parallel.statistics().exchange)
        seconds["allreduce"] = 0.1
    check(parallel, oracle)
    return found


def test_another_exchange_replaces_torchs_reducer_when_steps_become_slower(pair: Ranks):
    for before, after in pair(chosen_again, 150, 200):
        assert before == "allreduce"
        assert after in ("host", "tree")


def tried(slow: list[str]) -> tuple[str, str, bool, set[Kind]]:
    """Try exchanges, of which `host` is the fastest, with a recorder.

    Returns the exchange of the first step, its name in the trials, whether it was freed, and what
    is recorded at the end.
    """
    module, oracle = build(Net)
    methods = {name: find_strategy(name).runner() for name in EXCHANGES}
    methods = {name: one.method(find_strategy(name).config()) for name, one in methods.items()}
    trials, group = Trials(methods, clock := Ticking(), slow), joined(torch.device("cpu"), 20.0)
    trying, recorder = Trying(module, methods, trials, group=group), Recorder(clock, "cpu", 0)
    trying.record(recorder)
    first, name = weakref.ref(trying._gradients), trials.name
    train(trying, oracle, range(1))
    used = trying.statistics().exchange

    def before(step: int) -> None:
        clock.now += 0.01 if trials.name == "host" else 0.02

    train(trying, oracle, range(1, 60), before)
    recorder.start_trace()
    train(trying, oracle, range(60, 63), before)
    check(trying, oracle)
    assert trying.statistics().exchange == trials.name == "host"
    trying.close()
    gc.collect()
    return used, name, first() is None, {span.kind for span in recorder.spans()}


@pytest.mark.parametrize("slow", [[], ["allreduce"]])
def test_the_first_exchange_may_be_fast_is_freed_later_and_the_others_are_recorded_too(
    pair: Ranks, slow: list[str]
):
    for used, name, is_freed, kinds in pair(tried, slow):
        assert used == name not in (*slow, "host")
        assert is_freed
        assert {Kind.D2H, Kind.REDUCE} <= kinds


def closed(exchange: str) -> None:
    """Close the wrapper: gradients are kept, and later backward passes are not exchanged."""
    module, oracle = build(Net)
    parallel = parallel_of(module, exchange)
    train(parallel, oracle, range(3))
    before = [parameter.grad.clone() for parameter in parallel.parameters()]
    parallel.close()
    parallel.close()
    for one, parameter in zip(before, parallel.parameters(), strict=True):
        assert torch.equal(one, parameter.grad)
    for model in parallel, oracle:
        model.zero_grad()
        square(model, dist.get_rank(), 9).backward()
    for one, two in zip(parallel.parameters(), oracle.parameters(), strict=True):
        assert distance(one.grad, two.grad) <= 1e-12


def unfrozen(exchange: str, first: int, num_steps: int, alone: int = -1, **options: Any) -> None:
    """Unfreeze a layer in step `first`; rank 0 runs an extra forward in step `alone`."""
    module, oracle = build(Net)
    for model in module, oracle:
        model.b.requires_grad_(False)
    parallel = parallel_of(module, exchange, deadline_s=2.0, **options)

    def before(step: int) -> None:
        for model in module, oracle:
            model.b.requires_grad_(step >= first)
        if step == alone:
            if dist.get_rank() == 0:
                parallel(batch(0, 99))
            dist.barrier()

    train(parallel, oracle, range(num_steps), before)
    check(parallel, oracle)


def unfrozen_when_another_exchange_begins(exchange: str) -> None:
    """Unfreeze a layer after the next exchange was prepared without it."""
    unfrozen("auto", 10, 16, chunk="auto")  # ten steps are timed before


def run_by_one_rank_alone_after_unfreezing(exchange: str) -> None:
    """Run an extra forward on rank 0, in which DDP's new reducer would wait."""
    unfrozen(exchange, 2, 5, alone=3)


@each_place
@pytest.mark.parametrize(
    "program",
    [
        closed,
        unfrozen_when_another_exchange_begins,
        run_by_one_rank_alone_after_unfreezing,
    ],
)
def test_a_program_does_what_one_process_does(ranks, program, exchange):
    ranks(program, exchange)


def with_buffer(nbytes: int) -> nn.Module:
    module = Net()
    module.register_buffer("extra", torch.zeros(nbytes))
    return module


def with_frozen(width: int) -> nn.Module:
    module = Net()
    module.c = nn.Linear(6, width).requires_grad_(False)
    return module


# For each difference: the module of a rank, and a part of the error.
DIFFERING: dict[str, tuple[Callable[[int], nn.Module], str]] = {
    "order": (lambda rank: Net(layers="bac" if rank else "abc"), "'b.weight'"),
    "shape": (lambda rank: nn.Linear(6, 3 + rank), "[4, 6]"),
    "number": (lambda rank: nn.Linear(6, 3, bias=rank == 0), "missing"),
    "type": (lambda rank: nn.Linear(6, 3).to((torch.float32, torch.float64)[rank]), "float64"),
    "strides": (
        lambda rank: nn.Conv2d(3, 4, 2).to(
            memory_format=(torch.contiguous_format, torch.channels_last)[rank]
        ),
        "[12, 1, 6, 3]",
    ),
    "frozen": (lambda rank: with_frozen(6 + rank), "[7, 6]"),
    "buffer": (lambda rank: with_buffer(3 + rank), "'extra' of shape [4]"),
}


def differing(what: str) -> None:
    parallel_of(DIFFERING[what][0](dist.get_rank()), "host", deadline_s=2.0)


@pytest.mark.parametrize("what", DIFFERING)
def test_modules_that_differ_between_ranks_are_refused_on_all(pair: Ranks, what: str):
    for failure in pair(differing, what, errors=True):
        assert (failure.kind, failure.fields["field"]) == ("ModelsDiffer", "module")
        assert DIFFERING[what][1] in failure.fields["problem"]


def _double(parameter: Tensor) -> None:
    parameter.grad.mul_(2)


def _update(parameter: Tensor) -> None:
    with torch.no_grad():
        parameter -= 0.1 * parameter.grad
    parameter.grad = None


def hooked(exchange: str, name: str, early: bool) -> str:
    """Train with a user's gradient hook, registered before (`early`) or after wrapping."""
    hook = {"double": _double, "update": _update}[name]
    module, oracle = build(Net)
    if early:
        for model in module, oracle:
            model.b.weight.register_post_accumulate_grad_hook(hook)
    parallel = parallel_of(module, exchange, deadline_s=2.0)
    train(parallel, oracle, range(2))
    if not early:
        for model in module, oracle:
            model.b.weight.register_post_accumulate_grad_hook(hook)
    train(parallel, oracle, range(2, 4))
    return check(parallel, oracle)


@pytest.mark.parametrize(("exchange", "place"), MARKED[1:])
@pytest.mark.parametrize(
    ("hook", "early"), [("double", True), ("double", False), ("update", True), ("update", False)]
)
def test_a_gradient_hook_takes_effect_or_is_refused(ranks: Ranks, exchange, hook, early):
    """A gradient must not change after it is sent; `tree` sends all gradients after backward."""
    counts = hook == "double" and (early or exchange == "tree")
    for failure in ranks(hooked, exchange, hook, early, errors=not counts):
        if not counts:
            assert (failure.kind, failure.fields["field"]) == (
                "InvalidInput",
                "parameter 'b.weight'",
            )


def order_differs(exchange: str) -> None:
    """Run two models in a different order on each rank."""
    models = {name: parallel_of(Net(), exchange, deadline_s=2.0) for name in "ab"}
    for step in range(4):
        order = "ba" if dist.get_rank() else "ab"
        outputs = {name: models[name](batch(dist.get_rank(), step)) for name in order}
        (outputs["a"] * outputs["b"]).mean().backward()


def swaps_tensors(exchange: str) -> None:
    """Swap the parameters' C++ tensors, and with them their hooks."""
    module, oracle = build(Net)
    parallel = parallel_of(module, exchange)
    train(parallel, oracle, range(2))
    saved = copy.deepcopy(parallel.state_dict())
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        parallel.load_state_dict(saved)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    train(parallel, oracle, range(2, 5))


@pytest.mark.parametrize("exchange", ["tree", "host"])
@pytest.mark.parametrize("program", [order_differs, swaps_tensors])
def test_programs_that_would_give_wrong_gradients_are_refused(pair: Ranks, exchange, program):
    kinds = {"InvalidInput"} if program is order_differs else {"InvalidInput", "RuntimeError"}
    assert {one.kind for one in pair(program, exchange, errors=True)} <= kinds


@pytest.mark.parametrize(
    "setting",
    [
        {"exchange": "magic"},
        *({"chunk": chunk} for chunk in (0, 1.5, "all")),
        {"balance": "magic"},
        *({"codec": codec} for codec in ("fp8", 8, OneBit)),
        {"codec": "half", "exchange": "tree"},
        {"on_nonfinite": "ignore", "codec": "half"},
    ],
)
def test_invalid_settings_are_refused(setting: dict[str, Any]):
    with refused(next(iter(setting))):
        DataParallel(nn.Linear(3, 2), **setting)


def told(exchange: str) -> dict[str, Any]:
    module, oracle = build(Net)
    parallel = parallel_of(module, exchange)
    train(parallel, oracle, range(5))
    # A container's /dev/shm has 64 MiB; writing to a full one causes SIGBUS.
    assert "/dev/shm" not in Path("/proc/self/maps").read_text()
    timeline = parallel.timeline()
    return {
        "statistics": vars(parallel.statistics()),
        "total": 5 * sum(parameter.nbytes for parameter in parallel.parameters()),
        "origin": timeline.origin.value,
        "start": min(span.start_s for span in timeline.spans),
        "backwards": sum(span.end_s < span.start_s for span in timeline.spans),
        "kinds": {str(span.kind.value) for span in timeline.spans},
        "steps": timeline.num_steps(),
        "why": parallel.why,
    }


@pytest.mark.parametrize(
    ("exchange", "kinds"),
    [
        ("allreduce", {"forward", "step"}),
        ("tree", {"forward", "backward", "send", "step"}),
        ("host", {"forward", "backward", "d2h", "reduce", "step"}),
    ],
)
def test_statistics_and_timeline_describe_the_training(pair: Ranks, exchange: str, kinds: set[str]):
    found = pair(told, exchange)
    for outcome in found:
        statistics, total = outcome["statistics"], outcome["total"]
        assert (statistics["exchange"], statistics["num_steps"]) == (exchange, 5)
        assert outcome["why"].startswith(f"{exchange}: ")
        sent, received = statistics["bytes_sent"], statistics["bytes_received"]
        # `tree` adds 8 bytes per parameter and step: a flag with the gradient's type.
        margin = 5 * 8 * 6 if exchange == "tree" else 0
        assert total <= min(sent, received) <= max(sent, received) <= total + margin
        assert statistics["chunk"] == (1 if exchange == "host" else None)
        if exchange != "allreduce":
            assert statistics["hidden_s"] >= 0
            assert statistics["exposed_s"] > 0
        assert (outcome["origin"], outcome["start"], outcome["backwards"]) == ("measured", 0.0, 0)
        assert kinds <= outcome["kinds"]
    assert found[0]["steps"] == 5


@pytest.mark.parametrize("exchange", ["auto", *EXCHANGES])
def test_a_process_alone_trains_as_without(exchange: str):
    torch.manual_seed(0)
    module = nn.Linear(3, 2)
    parallel = DataParallel(module, exchange=exchange)
    inputs = torch.ones(4, 3)
    with parallel.no_sync():
        parallel(inputs).sum().backward()
    assert torch.equal(module.weight.grad, torch.full((2, 3), 4.0))
    torch.optim.SGD(parallel.parameters(), lr=0.1).step()
    parallel(inputs)
    assert list(parallel.state_dict()) == ["module.weight", "module.bias"]
    statistics = parallel.statistics()
    assert (statistics.num_steps, statistics.bytes_sent) == (0, 0)
    assert {str(span.kind.value) for span in parallel.timeline().spans} == {"forward", "step"}
    if exchange not in ("auto", "allreduce"):
        with refused("_update_process_group"):
            parallel._update_process_group(None)
    parallel.close()
