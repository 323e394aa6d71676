"""paceline.DataParallel against one process on the samples of all ranks."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

from launched import output
from paceline import DataParallel
from paceline.core.errors import InvalidInput

EXCHANGES = ("allreduce", "tree", "host")
LEARNED = [
    f"{name}_{kind}" for kind in ("float64", "float32") for name in ("sgd", "momentum", "adam")
]
VARIED = [
    "adam_float32_again",
    "adam_float32_with_chunks_of_two",
    "adam_float32_with_chunks_of_all",
    "adam_float32_while_chunks_are_sought",
]
CHOSEN = "adam_float32_with_an_exchange_of_its_own_choice"
IN_THREES = [
    "tied_weights",
    "order_that_differs_between_ranks",
    "no_sync",
    "clipping",
    "gradients_kept_between_steps",
    "buffers_as_in_ddp",
]
# Those that torch's DistributedDataParallel refuses.
IN_THREES_OF_OURS = ["unused_on_one_rank", "twice_in_reentrant_checkpoints"]
IN_THREES_OF_HOST = ["failure_in_the_middle", "failures_by_turns"]

ON_GPU = [
    "momentum_float64",
    "adam_float32",
    "adam_float32_with_chunks_of_two",
    "adam_float32_while_chunks_are_sought",
]

Found = dict[tuple[str, str], list[dict]]


def run(folder: Path, num_ranks: int, program: str, *arguments: str, before=()) -> Found:
    rows = map(
        json.loads, output(folder, num_ranks, program, *arguments, before=before).splitlines()
    )
    return {(exchange, name): outcomes for exchange, name, outcomes in rows}


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Found:
    """What two ranks have learned."""
    names = ",".join([*LEARNED, *VARIED, "digits", CHOSEN])
    return run(tmp_path_factory.mktemp("two"), 2, "correctness.py", ",".join(EXCHANGES), names)


@pytest.fixture(scope="module")
def on_gpus(tmp_path_factory) -> Found:
    """What two ranks have learned, each on a simulated GPU."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PACELINE_SIMULATED_GPUS", "2")
        folder = tmp_path_factory.mktemp("on_gpus")
        return run(folder, 2, "correctness.py", "host", ",".join(ON_GPU))


@pytest.fixture(scope="module")
def three(tmp_path_factory) -> Found:
    """What three ranks have come to."""
    names = ",".join([*IN_THREES, *IN_THREES_OF_OURS, *IN_THREES_OF_HOST])
    return run(tmp_path_factory.mktemp("three"), 3, "readiness.py", ",".join(EXCHANGES), names)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("name", LEARNED)
def test_two_ranks_learn_what_one_process_learns(pair: Found, exchange: str, name: str):
    first, second = pair[exchange, name]
    tolerance = 1e-12 if name.endswith("float64") else 1e-5
    assert max(first["worst"], second["worst"]) <= tolerance
    assert first["bits"] == second["bits"]  # after every step


@pytest.mark.parametrize("name", ON_GPU)
def test_two_ranks_on_gpus_learn_what_one_process_learns(on_gpus: Found, name: str):
    first, second = on_gpus["host", name]
    assert max(first["worst"], second["worst"]) <= (1e-12 if "float64" in name else 1e-5)
    assert first["bits"] == second["bits"]  # after every step


def test_chunks_change_no_bit_on_gpus_either(on_gpus: Found):
    outcomes = [one for name in ON_GPU[1:] for one in on_gpus["host", name]]
    assert len({outcome["bits"] for outcome in outcomes}) == 1
    tried, _ = on_gpus["host", "adam_float32_while_chunks_are_sought"][0]["chosen"]
    assert len(set(tried)) == len(tried) >= 1


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("name", VARIED)
def test_neither_time_nor_chunks_change_a_bit(pair: Found, exchange: str, name: str):
    outcomes = [*pair[exchange, "adam_float32"], *pair[exchange, name]]
    assert len({outcome["bits"] for outcome in outcomes}) == 1


def test_chunks_are_tried_while_training_goes_on(pair: Found):
    first, second = pair["host", "adam_float32_while_chunks_are_sought"]
    tried, exchange = first["chosen"]
    assert exchange == "host"
    assert len(set(tried)) == len(tried) >= 2
    assert first["why"] == second["why"]


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_all_ranks_choose_the_same_exchange(pair: Found, exchange: str):
    first, second = pair[exchange, CHOSEN]
    assert max(first["worst"], second["worst"]) <= 1e-5
    assert first["bits"] == second["bits"]
    assert first["chosen"][1] == second["chosen"][1]
    assert first["why"] == second["why"]
    assert first["why"].startswith(f"{first['chosen'][1]}: the fastest of those measured")
    # A network of four layers; the figure of host is that of the chunks it was measured with.
    assert re.search(r"; host [\d.e+]+ ms in chunks of [1-4] layers?(;|$)", first["why"])


@pytest.mark.parametrize("rank", [0, 1])
def test_host_and_tree_have_one_loss_curve_on_the_digits(pair: Found, rank: int):
    losses = {exchange: pair[exchange, "digits"][rank]["losses"] for exchange in EXCHANGES}
    assert losses["host"] == losses["tree"]
    assert losses["host"] == pytest.approx(losses["allreduce"], rel=1e-4)
    assert sum(losses["host"][-10:]) < 0.2 * sum(losses["host"][:10])


@pytest.mark.parametrize(
    ("exchange", "name"),
    [
        *((exchange, name) for exchange in EXCHANGES for name in IN_THREES),
        *((exchange, name) for exchange in ("tree", "host") for name in IN_THREES_OF_OURS),
        *(("host", name) for name in IN_THREES_OF_HOST),
    ],
)
def test_three_ranks_agree_too(three: Found, exchange: str, name: str):
    outcomes = three[exchange, name]
    assert not [outcome["error"] for outcome in outcomes if "error" in outcome]
    assert max(outcome["worst"] for outcome in outcomes) <= 1e-12
    assert len({outcome["bits"] for outcome in outcomes}) == 1


def test_gradients_need_no_space_in_dev_shm(tmp_path):
    """A container gives /dev/shm 64 MiB; a full one would end in a SIGBUS."""
    mounted = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
    try:
        subprocess.run(["unshare", "-m", "sh", "-c", mounted], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("a mount namespace needs root")
    before = ("unshare", "-m", "sh", "-c", f'{mounted} && exec "$@"', "sh")
    found = run(tmp_path, 2, "correctness.py", "host", "large", before=before)
    first, second = found["host", "large"]
    assert first["bytes"] == second["bytes"] == 72 * 2**20
    assert first["right"]
    assert second["right"]


@pytest.mark.parametrize("exchange", ["auto", *EXCHANGES])
def test_a_process_alone_trains_as_without(exchange):
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
    parallel.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exchange": "magic"}, "exchange: 'magic' is not known; choose one of"),
        ({"codec": "fp8"}, "codec: 'fp8' is not known"),
        ({"chunk": 0}, "chunk: must be 'auto' or a number of layers, not 0"),
        ({"chunk": 1.5}, "chunk: must be 'auto' or a number of layers, not 1.5"),
        ({"chunk": "all"}, "chunk: must be 'auto' or a number of layers, not 'all'"),
    ],
)
def test_what_is_not_known_is_refused(options, message):
    with pytest.raises(InvalidInput, match=message):
        DataParallel(nn.Linear(3, 2), **options)
