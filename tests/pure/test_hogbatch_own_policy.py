"""A policy of the user's by its name: made, asked, and refused in one line."""

from pathlib import Path

import pytest

from paceline.core.cost import Roofline
from paceline.core.errors import InvalidInput
from paceline.core.simulate import simulate
from paceline.core.strategy import Window
from paceline.records.machine_file import find_machine
from paceline.records.settings import check_options
from paceline.strategies.hogbatch import STRATEGY, statistics
from paceline.strategies.hogbatch.config import Hogbatch, WorkerSpec
from paceline.strategies.hogbatch.plan import plan
from paceline.strategies.hogbatch.policy import POLICIES, policy_of
from paceline.studies.papers.hogbatch import DATA_SETS, devices, workload

SPECS = (WorkerSpec("cpu", 2), WorkerSpec("gpu"))
MODULE = '''
class Growing:
    """One more sample with each batch, up to twice the batch size of the run."""

    def __init__(self, workers):
        self.most = [2 * workers.batch_size] * len(workers.specs)
        self.asked = []

    def next_batch(self, worker, updates, sizes):
        self.asked.append((worker, updates))
        return min(sizes[worker] + 1, self.most[worker])


class Nested:
    Policy = Growing


class Silent:
    most = (4, 4)

    def __init__(self, workers):
        pass

    def next_batch(self, worker, updates, sizes):
        return None if worker else 5


class Failing(Silent):
    def next_batch(self, worker, updates, sizes):
        raise KeyError("no such worker")


class Boundless:
    def __init__(self, workers):
        pass

    next_batch = len


class Unmade:
    pass


def sized(workers):
    return object()
'''


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_policies.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def made(name: str):
    return policy_of(Hogbatch(policy=f"own_policies:{name}"), SPECS, (1.0, 2.0), 8)


@pytest.mark.parametrize("name", ["Growing", "Nested.Policy"])
def test_it_is_asked_as_the_built_in_ones_are(name: str):
    policy = made(name)
    assert policy.most == (16, 16)
    assert [policy.next_batch(0, [1.0, 0.0], [size, 3]) for size in (0, 1, 15, 16)] == [
        1,
        2,
        16,
        16,
    ]
    assert policy.policy.asked[0] == (0, (1.0, 0.0))


def test_the_built_in_ones_are_instances_of_the_same_protocol():
    for name in POLICIES:
        policy = policy_of(Hogbatch(policy=name), SPECS, (1.0, 2.0), 8)
        first = [policy.next_batch(worker, (0.0, 0.0), (0, 0)) for worker in (0, 1)]
        assert all(1 <= size <= most for size, most in zip(first, policy.most, strict=True))


def test_a_plan_asks_it_too():
    config = check_options(STRATEGY, {"policy": "own_policies:Growing", "gpu_depth": 1}, 2)
    machine, work = devices("cpu0", "gpu0"), workload(DATA_SETS[0], 8)
    timeline = simulate(plan(work, machine, config, Window(4)), Roofline.of(machine))
    sizes = [size for _, size in statistics.batch_sizes(timeline)["gpu0"]]
    assert len(sizes) > 2
    assert sizes == [min(16, number + 1) for number in range(len(sizes))]
    assert STRATEGY.memory(work, machine, config)["gpu0"] > 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Missing", r"policy: 'own_policies:Missing' cannot be imported: .*no attribute 'Missing'"),
        ("Unmade", r"policy: 'own_policies:Unmade' cannot be made for 2 workers: .*no arguments"),
        ("sized", r"policy: 'own_policies:sized' has no next_batch\(worker, updates, sizes\)"),
        ("Boundless", r"has to have most, the largest batch of each of 2 workers, not None"),
    ],
)
def test_what_is_no_policy_is_refused(name: str, message: str):
    with pytest.raises(InvalidInput, match=message):
        made(name)


def test_a_module_that_there_is_not_is_refused():
    with pytest.raises(InvalidInput, match=r"'no_such:Policy' cannot be imported: .*No module"):
        policy_of(Hogbatch(policy="no_such:Policy"), SPECS, (1.0, 2.0), 8)


@pytest.mark.parametrize("name", ["omnivore", "a:", ":b", "a b:c", "a.1:c", ""])
def test_other_names_are_refused_with_the_known_ones(name: str):
    with pytest.raises(InvalidInput, match=r"policy: .*adaptive.*package\.module:Policy"):
        check_options(STRATEGY, {"policy": name}, 2)


def test_every_size_is_checked():
    policy = made("Silent")
    with pytest.raises(InvalidInput, match=r"worker 0 a batch of 5; .* from 1 to its most, 4"):
        policy.next_batch(0, (0.0, 0.0), (0, 0))
    with pytest.raises(InvalidInput, match="gives worker 1 a batch of None"):
        policy.next_batch(1, (0.0, 0.0), (0, 0))
    with pytest.raises(InvalidInput, match="fails for worker 1: KeyError: 'no such worker'"):
        made("Failing").next_batch(1, (0.0, 0.0), (0, 0))


def test_a_machine_s_plan_names_the_policy_that_cannot_be_made():
    machine = find_machine("p3-16xlarge")
    with pytest.raises(InvalidInput, match="policy: 'own_policies:Unmade'"):
        plan(workload(DATA_SETS[0], 8), machine, Hogbatch(policy="own_policies:Unmade"), Window(1))
