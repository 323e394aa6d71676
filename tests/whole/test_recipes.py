"""Recipes that a Python program passes as objects, or that the command line names."""

import json
from pathlib import Path

import pytest

from refusals import refused_field

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]
PROGRAM = str(TESTS / "whole" / "programs" / "own_recipe.py")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
ROUNDING = 1e-5


def rows(done) -> list[dict]:
    assert done.code == 0, done.err
    return [json.loads(line) for line in done.out.splitlines()]


def check(row: dict) -> None:
    """Check that a run's weights equal those of plain PyTorch in one process."""
    assert row["apart"] < ROUNDING
    assert row["faults"] == []
    (epoch,) = row["epochs"]
    assert row["score"] == "score"  # a lambda has no name
    assert 0 <= epoch["score"] <= 1
    assert epoch["test_loss"] > 0


def test_a_program_trains_a_recipe_of_closures_with_each_exchange(start):
    """Train four times in one process that has used PyTorch with several threads."""
    found = rows(start(PROGRAM, "all_strategies", afresh=True).finish())
    assert [row["strategy"] for row in found] == ["allreduce", "host", "tree", "allreduce"]
    assert [row["workers"] for row in found] == [2, 2, 2, 1]
    for row in found:
        check(row)
        assert row["threads"] == 1  # the forking thread has ended
    assert len({row["folder"] for row in found}) == 4


def test_a_program_that_leads_the_workers_trains_a_recipe_of_closures(start):
    found = rows(start(PROGRAM, "led", afresh=True).finish())
    twice = ["hogbatch"] * 2 + ["wheel"] * 2 + ["subbatch"] * 2
    assert [row["strategy"] for row in found] == twice
    for row in found:
        assert row["losses"][-1] < row["losses"][0]
        assert (row["lost"], row["numbers"]) == ([], True)


def test_under_torchrun_each_process_of_a_program_is_a_rank(start):
    found = rows(start(*TORCHRUN, PROGRAM, "as_a_rank", afresh=True).finish())
    trained = [row for row in found if "refused" not in row]
    assert sorted(row["strategy"] for row in trained) == ["allreduce"] * 2 + ["host"] * 2
    for row in trained:
        check(row)
    assert len({row["folder"] for row in trained}) == 2  # both ranks return rank 0's folder
    # No thread of a process group is left: it could abort the program at its end.
    refused = [row for row in found if "refused" in row]
    assert refused == [{"refused": "strategy", "left": []}] * 2


def test_a_program_gets_the_restarted_run_after_a_worker_died(start):
    found, trained = rows(start(PROGRAM, "restarts").finish())
    assert found["is_copied"]
    assert {"result.json", "model.safetensors"} <= set(found["files"])
    assert any("restarted from the beginning" in one for one in found["lost"])
    check(trained)


def test_a_program_resumes_a_run_of_its_recipe(start, paceline, tmp_path):
    (row,) = rows(start(PROGRAM, "resumes").finish())
    first, second = (tmp_path / folder for folder in row["folders"])
    assert row["alike"]
    assert first == second
    done = paceline("train", "--config", str(first / "run.toml"))
    assert (done.code, refused_field(done.err)) == (2, "given-recipe:Model")


def test_the_first_example_of_the_documentation_runs_both_ways(start, paceline, tmp_path):
    page = (TESTS.parent / "docs" / "recipes.md").read_text()
    program = page.partition("```python\n")[2].partition("```")[0]
    assert program.startswith("# bigrams.py\n")
    (tmp_path / "bigrams.py").write_text(program)
    done = start("bigrams.py").finish()
    assert done.code == 0, done.err
    loss, folder = done.out.split()
    assert float(loss) < 3.5  # a uniform distribution over 256 bytes has 5.5
    assert (tmp_path / folder / "report.html").is_file()
    named = paceline("train", "bigrams:recipe", *LONG_ENOUGH[:2], "--profile-s", "0.1", "--json")
    assert json.loads(named.out)["epochs"][-1]["test_loss"] < 3.5
    refused = page.partition("$ paceline train bigrams:recipe --data digits\n")[2].split("\n")[0]
    assert refused_field(refused) == "data"


LONG_ENOUGH = ("--workers", "2", "--batch-size", "8", "--epochs", "1", "--profile-s", "0.1")


@pytest.fixture
def named(outcome, tmp_path):
    """Run a command with a recipe of own_recipes.py, and return its result."""
    (tmp_path / "own_recipes.py").write_text((TESTS / "own_recipes.py").read_text())
    return lambda verb, name, *options: outcome(verb, f"own_recipes:{name}", *options)


def test_a_recipe_without_tests_and_score_is_trained(named):
    (epoch,) = named("train", "fields", *LONG_ENOUGH)["epochs"]
    assert (epoch["test_loss"], epoch["score"]) == (None, None)


def test_a_recipe_is_profiled_with_its_own_loss_and_optimizer(named):
    result = named("profile", "tokens", "--batch-size", "16", "--steps", "4")
    assert [row["name"] for row in result["layers"]] == ["embedding", "head"]
    # AdamW keeps two values per parameter, and a step count.
    assert result["memory"]["momentum"] >= 2 * result["memory"]["parameters"]
    assert any("embedding" in row["name"] for row in result["operators"])


def test_a_recipe_is_scaled_on_its_own_data(named):
    options = ("--workers", "1,2", "--batch-size", "8", "--strategy", "host", "--repeats", "1")
    kinds = ("--kind", "measured,rehearsed,predicted", "--device", "p100")
    quick = ("--profile-s", "0.1", "--steps", "5")
    cells = named("scale", "tokens", *options, *kinds, *quick)["cells"]
    assert [cell["error"] for cell in cells] == [None] * 6  # three kinds, two numbers of workers


def test_the_example_of_encoded_activations_learns_and_prints_the_bytes_sent(start):
    done = start(*TORCHRUN, str(TESTS.parent / "examples" / "activations.py")).finish()
    assert done.code == 0, done.err
    words = done.out.split()
    assert float(words[words.index("accuracy") + 1].rstrip("%")) > 90
    nbytes = int(words[words.index("bytes") - 1].replace(",", ""))
    # Rank 0 sends the activations (128 bytes) of its 899 samples and the partial scores (10 bytes)
    # of rank 1's 898 samples. In the 8 epochs, but not in the final test, it also sends gradients:
    # of its own samples' scores, and of rank 1's activations. Block scales take less than 10 %.
    rows = 8 * (899 * (128 + 10) + 898 * (128 + 10)) + 899 * 128 + 898 * 10
    assert rows < nbytes < 1.1 * rows
