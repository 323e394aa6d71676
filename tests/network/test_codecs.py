"""Encoded gradients between two hosts with two ranks each."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from host import missing
from hosts import TwoHosts

from codec_training import check_poisoned, same
from processes import DEADLINE_S, ENVIRONMENT

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parent / "programs" / "codecs.py"
# Per case: the optimizers that raise, and the number of skipped steps. Only the first optimizer
# has non-finite gradients, because layers are sent separately; the second changes nothing.
POISONED_CASES = {"nan_raises_by_default": ([0], 0), "infinity_is_skipped": ([], 1)}
OTHER = ("right_gradients", "many_steps_of_one_bit", "auto", "bytes_between")
REFUSED = ("other_codecs", "float64")
Found = dict[str, list[Any]]  # the outcomes of each case, by rank


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Run all cases; return their outcomes."""
    problem = missing()
    if problem:
        pytest.skip(problem)
    command = [sys.executable, str(PROGRAM), *OTHER, *REFUSED, *POISONED_CASES]
    place = tmp_path_factory.mktemp("hosts")
    with TwoHosts(rate=None) as hosts:
        finished = hosts.run(command, 2, ENVIRONMENT, cwd=place, deadline_s=2 * DEADLINE_S)
    assert [one.code for one in finished] == [0, 0], "".join(one.err for one in finished)
    return dict(map(json.loads, finished[0].out.splitlines()))


def test_gradients_are_within_the_codecs_error_of_one_process(found: Found) -> None:
    outcomes = found["right_gradients"]
    assert len(outcomes) == 4
    assert 0.05 < same([outcome["worst"] for outcome in outcomes]) <= 1
    same([outcome["bits"] for outcome in outcomes])
    assert {outcome["codec"] for outcome in outcomes} == {"dynamic8/1024: requested"}


def test_bytes_between_hosts_are_those_of_the_codec(found: Found) -> None:
    """Each host sends one half of its gradients and the sum of the other half: 4 bytes a value."""
    of_hosts = [found["bytes_between"][rank] for rank in (0, 2)]
    for of_host in of_hosts:
        whole = of_host["None"]
        assert whole == pytest.approx(5 * 4 * of_host["count"], rel=0.1)
        assert of_host["dynamic8"] / whole == pytest.approx(1 / 4, rel=0.1)
        assert of_host["half"] / whole == pytest.approx(1 / 2, rel=0.1)
    for codec in ("None", "dynamic8", "half"):
        same([outcome[f"bits of {codec}"] for outcome in found["bytes_between"]])


def test_the_errors_of_onebit_do_not_accumulate(found: Found) -> None:
    """Gaps between gradients are sent, too, and could accumulate errors."""
    outcome = same(found["many_steps_of_one_bit"])
    assert outcome["largest"] < 5
    assert outcome["lacking"] < 10


def test_hosts_decide_together_which_codec_pays(found: Found) -> None:
    first, second, third, fourth = found["auto"]
    assert max(outcome["worst"] for outcome in found["auto"]) <= 1
    same([outcome["bits"] for outcome in found["auto"]])
    assert first["codec"] == third["codec"]
    assert first["codec"].startswith(("dynamic8: the fastest", "float32: the fastest"))
    assert second["codec"] == fourth["codec"] == "auto: requested"


@pytest.mark.parametrize("name", REFUSED)
def test_a_codec_that_ranks_cannot_use_is_refused_on_all(found: Found, name: str) -> None:
    """This includes ranks that send nothing between hosts."""
    assert len(found[name]) == 4
    for outcome in found[name]:
        assert outcome["error"].startswith("InvalidInput: codec ")


@pytest.mark.parametrize("name", POISONED_CASES)
def test_a_non_finite_gradient_raises_or_is_skipped_on_all_ranks(found: Found, name: str) -> None:
    check_poisoned(found[name], *POISONED_CASES[name])
    assert found[name][0]["num_nonfinite"] >= 1
