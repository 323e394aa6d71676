"""Programs of the kind that people train: the same with paceline.DataParallel as with torch's own.

Each runs on two ranks with DistributedDataParallel and with every exchange, and is compared step by
step: losses, gradients, parameters, buffers, random streams, and how often the module ran. The
programs are in the folder `programs`, and their names say what they do.
"""

import pytest

from pair import RankFailed, Ranks
from programs_of_ranks import PROGRAMS, check, names_in

EXCHANGES = ("allreduce", "host", "host_chunk_1", "tree")
# In few steps "auto" does nothing but "allreduce"; these take many, or change what is exchanged.
OF_AUTO = ("compiled", "groups", "loops", "modes", "optimizers", "switching", "unused")
# Programs that run with every exchange in `make test`.
ALL_QUICK: frozenset[str] = frozenset()
# Compiling takes seconds; these show most.
COMPILED = ("compiled_before_with_the_eager_backend", "module_that_is_compiled_in_place")
FAULTS = {
    "differs_in_the_second_step": "step 1: module 0: gradients: 0.bias: ",
    "draws_a_number_too_many": "streams: torch: ",
    "runs_forward_once_too_often": "module 0: runs: 2, not 1",
    "raises_where_ddp_does_not": "raised ValueError: of ours alone, not went on",
}


def cases() -> list[object]:
    """Every program with every exchange; what is not quick is slow."""
    found = []
    for name in names_in(PROGRAMS):
        file, _, own = name.partition(".")
        for exchange in (*EXCHANGES, *(["auto"] if file in OF_AUTO else [])):
            is_quick = exchange == "host" or name in ALL_QUICK
            is_quick &= file != "compiled" or own in COMPILED
            found.append(pytest.param(name, exchange, marks=[] if is_quick else pytest.mark.slow))
    return found


@pytest.mark.parametrize(("name", "exchange"), cases())
def test_a_program_is_the_same_as_with_ddp(
    pair: Ranks, name: str, exchange: str, request: pytest.FixtureRequest
):
    deadline_s = 45 if request.node.get_closest_marker("slow") is None else 300
    pair(check, PROGRAMS, name, exchange, "ddp", group=False, deadline_s=deadline_s)


@pytest.mark.parametrize("name", FAULTS)
def test_what_a_program_does_otherwise_is_told(pair: Ranks, name: str):
    with pytest.raises(RankFailed) as caught:
        pair(check, PROGRAMS / "faulty", f"faulty.{name}", "host", "ddp", group=False)
    assert FAULTS[name] in str(caught.value)
