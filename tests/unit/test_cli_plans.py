"""`paceline plan` of one strategy: layers by number, lanes, and a policy of the user's."""

import json
import re
from pathlib import Path

import pytest

from command_line import MACHINE

DOCS = Path(__file__).parents[2] / "docs"
POLICIES = '''
class One:
    """One sample, whatever the others do: what hogwild gives a thread."""

    def __init__(self, workers):
        self.most = [1 for spec in workers.specs]

    def next_batch(self, worker, updates, sizes):
        return 1
'''


def planned(line, *arguments: object) -> dict:
    line("plan", *arguments, "--json")
    assert (line.code, line.err) == (0, "")
    return json.loads(line.out)


def test_a_layer_of_sequential_is_named_by_its_number(line):
    """Both bodies of 2,632 values cross to the hub, with labels and 16 values of 32 samples."""
    asked = ("--machine", "k40-gigabit", "--input-shape", "1x8x8", "--workers", 2)
    cut = ("--strategy", "wheel", "--set", "head=7")
    found = planned(line, "own_recipes:numbered", *asked, *cut)
    assert found["refused"] == []
    assert {row["config"]["head"] for row in found["plans"]} == {"7"}
    body = (4 * 9 + 4) + (16 * 144 + 16) + (16 * 16 + 16)
    best = found["plans"][0]
    assert best["wire_nbytes_per_step"] == 2 * 4 * (body + 32 + 32 * 16)


def test_more_workers_than_devices_are_planned_in_lanes(line):
    """Six bodies alternate by twos beside the hub; those of other strategies have no device."""
    asked = ("--machine", "k40-gigabit", "--workers", 6, "--batch-size", 6 * 256)
    found = planned(line, "alexnet", *asked)
    assert {(row["strategy"], row["workers"]) for row in found["plans"]} == {("wheel", 6)}
    best = found["plans"][0]
    assert (best["config"]["lanes"], best["config"]["child_hubs"]) == (2, 0)
    assert len({best["memory_nbytes"][f"gpu{body}"] for body in (1, 2, 3)}) == 1
    assert "6 do not fit" in {row["strategy"]: row["why"] for row in found["refused"]}["allreduce"]


def hogbatch(line, policy: str) -> dict:
    asked = ("--machine", MACHINE, "--workers", 2, "--batch-size", 128)
    found = planned(
        line, "mlp-64-128-10", *asked, "--strategy", "hogbatch", "--set", f"policy={policy}"
    )
    (row,) = found["plans"]
    assert row["config"]["policy"] == policy
    return row


def test_a_policy_of_the_users_decides_the_sizes_of_a_plan(line):
    Path("own_sizes.py").write_text(POLICIES)
    own, hogwild, hogbatch_s = (
        hogbatch(line, name)["step_s"] for name in ("own_sizes:One", "hogwild", "hogbatch")
    )
    assert own == pytest.approx(hogwild)
    assert own > 1.1 * hogbatch_s  # a call's latency for each sample


def test_the_policy_of_the_docs_is_planned(line):
    text = (DOCS / "hogbatch.md").read_text()
    (source,) = re.findall(r"```python\n(class HalfTheFastest:.*?)```", text, re.DOTALL)
    Path("policy_of_docs.py").write_text(source)
    assert hogbatch(line, "policy_of_docs:HalfTheFastest")["samples_per_s"] > 0
    line("plan", "mlp-64-128-10", "--machine", MACHINE, "--workers", 2, "--strategy", "hogbatch",
         "--set", "policy=policy_of_docs:Quarter")  # fmt: skip
    assert line.code == 2
    assert "policy: 'policy_of_docs:Quarter' cannot be imported" in line.out + line.err
