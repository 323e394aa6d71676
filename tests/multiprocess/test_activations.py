"""Rows of all ranks and errors that come back, against one process that has the rows of all."""

import sys
from pathlib import Path

import pytest

from launched import PROGRAMS, Found, run, same, succeeded
from processes import Started

pytestmark = pytest.mark.slow

SIZES = (1, 2, 3, 4)
ROWS = {"even": (3, 3, 3, 3), "uneven": (3, 1, 40, 5), "with none": (2, 0, 3, 0)}
WIDTH, HEADER = 37, 40
# Bytes of so many values, as papers and formats have it.
NBYTES = {
    "dynamic8": lambda count: count + 4 * -(-count // 1024),
    "half": lambda count: 2 * count,
    "dynamic8/64": lambda count: count + 4 * -(-count // 64),
    "static8*10": lambda count: count,
}
EXAMPLE = Path(__file__).parents[2] / "examples" / "activations.py"


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> Found:
    """What came of all cases; each is for the first so many of four ranks."""
    return run(tmp_path_factory.mktemp("four"), 4, "activations.py")


def message(nbytes: int) -> int:
    return HEADER + 8 * -(-nbytes // 8)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("size", SIZES)
def test_without_a_codec_it_is_one_process(found: Found, size: int, rows: str):
    for name in ("gathers", "scatters"):
        for outcome in found[f"{name}_{size}_{rows}"][:size]:
            assert outcome["worst"] <= 1e-12, name


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("size", SIZES)
def test_each_rank_sends_its_rows_and_gets_those_of_others(found: Found, size: int, rows: str):
    lengths = [message(8 * WIDTH * count) for count in ROWS[rows][:size]]
    for rank, outcome in enumerate(found[f"gathers_{size}_{rows}"][:size]):
        others = sum(lengths) - lengths[rank]
        there, back = [(size - 1) * lengths[rank], others], [others, (size - 1) * lengths[rank]]
        assert outcome["sent"] == [there, back] * 2


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("size", SIZES[1:])
def test_what_travels_encoded_is_encoded_and_decoded_once(found: Found, size: int, rows: str):
    outcomes = found[f"encoded_{size}_{rows}"][:size]
    assert [outcome["wrong"] for outcome in outcomes] == [[]] * size
    assert len({outcome["bits"] for outcome in outcomes}) == 1
    for rank, outcome in enumerate(outcomes):
        for codec, nbytes in NBYTES.items():
            lengths = [message(nbytes(WIDTH * count)) for count in ROWS[rows][:size]]
            own = (size - 1) * lengths[rank]
            assert outcome["sent"][codec] == [own, sum(lengths) - lengths[rank]], codec


def test_activations_and_errors_have_a_codec_of_their_own(found: Found):
    for outcome in found["other_codecs_4_uneven"]:
        # Sums without a codec are of the same values in the same order.
        assert outcome["worst"] == [0.0, 0.0, 0.0]


def test_gradients_are_slopes_of_the_sum_of_all_losses(found: Found):
    for outcome in found["gradcheck"]:
        assert outcome["worst"] < 1e-7


def test_several_are_under_way_at_once(found: Found):
    outcome = same([{**one, "labels": None} for one in found["beside_other_work"]])
    assert outcome["same"] == [True] * 3
    labels = [100 * rank + n for rank, count in enumerate(ROWS["uneven"]) for n in range(count)]
    assert [one["labels"] for one in found["beside_other_work"]] == [labels] * 4


def test_bfloat16_stays_bfloat16(found: Found):
    outcome = same(found["bfloat16"])
    assert outcome == {"dtypes": ["torch.bfloat16"] * 2, "same": True}


def test_what_is_not_finite_is_an_error_on_all_ranks_that_names_one(found: Found):
    assert same(found["not_finite"])["said"] == [
        "NonFinite: fc1: 2 values of rank 1 are NaN or infinite as dynamic8/1024",
        "NonFinite: fc1: 2 values of rank 1 are NaN or infinite as float32",
        "NonFinite: fc1: 6 values of rank 3 are NaN or infinite as half",
        "NonFinite: the gradient of fc1: 3 values of rank 2 are NaN or infinite as dynamic8/1024",
        "NonFinite: the gradient of fc1: 3 values of rank 2 are NaN or infinite as float32",
        "nothing",
    ]


def test_what_does_not_fit_is_refused(found: Found):
    for rank, outcome in enumerate(found["refused"]):
        onebit, threshold, auto, double, errors, few, wrong, single, *differ = outcome["said"]
        assert "'onebit/1024' makes up for errors" in onebit
        assert "makes up for errors" in threshold
        assert "'auto' is a choice between codecs" in auto
        for one in (double, errors):
            assert one.startswith("InvalidInput: codec: torch.float64 cannot be encoded")
        assert few == ("InvalidInput: sizes: [2, 2, 2]; give the number of rows of each of 4 ranks")
        if rank in (0, 3):
            assert "of shape [2, 3], but by sizes [1, 2, 2, 1]" in wrong
        assert single.startswith("InvalidInput: x: a single value; give rows")
        kinds, shapes, integers, onebit = differ
        other = 0 if rank == 3 else 3
        for one in (kinds, shapes):
            assert one.startswith(f"InvalidInput: x: rank {other} has others than rank {rank}, ")
        assert integers.startswith("InvalidInput: x: of torch.int64; sums are of floating point")
        assert onebit == "nothing"


def test_nobody_waits_for_longer_than_the_group_does(found: Found):
    for rank, outcome in enumerate(found["absent"]):
        if rank != 2:
            [said] = outcome["said"]
            assert said.startswith("RuntimeError"), said


def test_a_killed_rank_is_named_by_the_others(tmp_path: Path):
    program = [sys.executable, str(PROGRAMS / "activations_lost.py")]
    launch = "import sys; from paceline.links.launch import launch; launch(sys.argv[1:], 3)"
    started = Started([sys.executable, "-c", launch, *program], tmp_path)
    try:
        done = started.finish(60)
        assert not started.members()
    finally:
        started.kill()
    assert done.code != 0
    [pid] = [line for line in done.out.splitlines() if line.startswith("victim ")]
    stops = [line for line in done.err.splitlines() if "WorkerLost: worker" in line]
    named = f"worker 1 (process {pid.split()[1]}) died in the middle of the run"
    assert sum(named in line for line in stops) >= 2, done.err


def test_the_example_learns_and_says_what_it_sent(start):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = succeeded(lambda: start(*torchrun, str(EXAMPLE)).finish())
    words = done.out.split()
    assert float(words[words.index("accuracy") + 1].rstrip("%")) > 90
    nbytes = int(words[words.index("bytes") - 1].replace(",", ""))
    # Rows of 128 activations and of 10 errors in 8 bits, and nearly as much back: of 8 epochs and
    # of the test, whose rows have no errors; rank 0 has 899 samples, and rank 1 has 898.
    rows = 8 * (899 * (128 + 10) + 898 * (128 + 10)) + 899 * 128 + 898 * 10
    assert rows < nbytes < 1.1 * rows
