"""Local updates of workers that join and leave: torchft quorums with workers in threads."""

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import paceline
from faults import Pause, failpoints
from paceline.core.errors import WorkerLost
from paceline.runs.elastic import _address_towards
from quorums import TIMEOUT, lighthouse, manager_of
from refusals import refused
from rounds import STEP, adamw, inner_step, naive, net, vector
from rpc_exchange import beside

pytest.importorskip("torchft")
# Raised by torchft.
pytestmark = pytest.mark.filterwarnings("ignore:The 'warn' method is deprecated")

OPTION = {"sync_every": 4, **STEP}


class Site:
    """A worker with its model, optimizer and manager."""

    def __init__(
        self,
        address: str,
        worker: int,
        seed: int = 0,
        quorum_timeout: timedelta = TIMEOUT,
        **option: Any,
    ) -> None:
        self.worker, self.option = worker, OPTION | option
        self.model = net(seed)
        self.optimizer = adamw(self.model)
        self.manager = manager_of(address, worker, quorum_timeout=quorum_timeout)
        self.updates: Any = None

    def train(
        self, num_steps: int | Callable[[], int], before: Callable[[int], None] = lambda _: None
    ) -> Tensor:
        """Train until `num_steps`; a joining worker receives its step number from its peers."""
        end = num_steps if callable(num_steps) else lambda: num_steps
        try:
            with paceline.LocalUpdates(
                self.model, self.optimizer, manager=self.manager, **self.option
            ) as self.updates:
                while (step := self.updates.num_steps) < end():
                    before(step)
                    inner_step(self.model, self.optimizer, self.worker, step)
        finally:
            self.manager.shutdown()
        return vector(self.model)


@pytest.fixture(autouse=True)
def without_simulated_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the simulated device, which lacks the streams that a manager creates."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)


@pytest.fixture
def address() -> Iterator[str]:
    with lighthouse() as found:
        yield found


def trained(address: str, num_workers: int, num_steps: int = 12, **option: Any) -> list[Tensor]:
    sites = [Site(address, worker, **option) for worker in range(num_workers)]
    return [one.result() for one in [beside(site.train, num_steps) for site in sites]]


def test_undisturbed_workers_train_as_a_fixed_group(address: str) -> None:
    found = trained(address, 2)
    assert torch.equal(*found)
    torch.testing.assert_close(found[0], naive([12, 12], [4, 4]))


@pytest.mark.parametrize("after", ["start", "headers", "mean"])
@pytest.mark.parametrize(
    "option", [{}, {"codec": "e3m0+feedback", "fragments": 2, "delay": 1, "mixing": 0.25}]
)
def test_an_exchange_that_fails_is_repeated_to_the_same_bits(
    address: str, after: str, option: dict[str, Any]
) -> None:
    expected = trained(address, 3, **option)
    fault = {"at": "local.exchange", "after": after, "worker": 1, "number": 2, "visit": 1}
    with failpoints(fault | {"do": "raise"}):
        found = trained(address, 3, **option)
    assert all(torch.equal(one, found[0]) for one in found)
    if after != "mean":  # otherwise it receives the state of the others, which have committed
        assert torch.equal(found[0], expected[0])


def test_bits_that_were_committed_by_one_worker_alone_are_repaired(tmp_path: Path) -> None:
    """Each torchft replica group commits alone, so others may repeat a committed exchange."""
    pause = Pause(tmp_path / "pause")
    place = {"after": "mean", "number": 1, "visit": 1}
    failing = [{"at": "local.exchange", "worker": worker, "do": "raise"} for worker in (0, 2)]
    armed = [one | place for one in failing] + [pause.at("local.exchange", worker=1, **place)]
    resumed = threading.Event()

    def wait(step: int) -> None:
        if step == 11:  # in the round after the exchange
            assert resumed.wait(30)

    with lighthouse(join_timeout_ms=200) as address, failpoints(*armed):
        sites = [Site(address, worker) for worker in range(3)]
        loops = [beside(site.train, 20, wait) for site in sites]
        pause.reached()
        while any(sites[worker].updates.num_steps < 11 for worker in (0, 2)):
            time.sleep(0.01)
        pause.go_on()
        while sites[1].updates.num_steps < 11:
            time.sleep(0.01)
        own, others = (sites[worker].updates._outer.values[0].clone() for worker in (1, 0))
        steps = {site.manager.current_step() for site in sites}
        resumed.set()
        found = [one.result() for one in loops]
    assert not torch.equal(own, others)
    assert len(steps) == 1
    assert all(torch.equal(one, found[0]) for one in found)


class Lost(Exception):
    pass


def test_the_remaining_workers_average_without_a_lost_one(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    def lose(step: int) -> None:
        if step == 6:
            raise Lost

    sites = [Site(address, worker) for worker in range(3)]
    lost = beside(sites[2].train, 12, lose)
    found = [one.result() for one in [beside(site.train, 12) for site in sites[:2]]]
    with pytest.raises(Lost):
        lost.result()
    assert torch.equal(*found)
    assert not torch.equal(found[0], naive([12, 12], [4, 4]))
    ours = [one.args for one in caplog.records if one.name == "paceline.exchange.elastic"]
    assert ours.count((1, 3, 2)) == 1  # exchange 1: from 3 to 2 workers; logged by worker 0 alone


def test_a_persistent_fault_ends_at_the_deadline(address: str) -> None:
    fault = {"at": "local.exchange", "after": "start", "number": 1, "do": "raise"}
    with failpoints(fault), pytest.raises(WorkerLost):
        beside(Site(address, 0, deadline_s=0.2).train, 12).result()


def test_a_worker_without_a_quorum_ends_at_the_managers_deadline() -> None:
    with lighthouse(min_replicas=2) as address:
        site = Site(address, 0, quorum_timeout=timedelta(seconds=1))
        with pytest.raises(WorkerLost):
            site.train(4)


@pytest.mark.parametrize("option", [{}, {"fragments": 2, "delay": 1, "mixing": 0.5}])
def test_a_joining_worker_receives_model_optimizer_and_step(
    address: str, option: dict[str, Any]
) -> None:
    old, begun = Site(address, 0, **option), threading.Event()
    joined: list[tuple[int, float]] = []

    def end() -> int:
        return joined[0][0] + 12 if joined else sys.maxsize

    first = beside(old.train, end, lambda step: begun.set() if step == 5 else None)
    assert begun.wait(30)
    new = Site(address, 1, seed=1, **option)

    def note(step: int) -> None:
        if not joined:
            joined.append((step, new.optimizer.state_dict()["state"][0]["step"].item()))

    second = beside(new.train, end, note)
    assert torch.equal(first.result(), second.result())
    [(step, step_of_optimizer)] = joined
    assert step == step_of_optimizer >= 4


def test_a_worker_with_other_settings_is_refused_and_the_others_continue(address: str) -> None:
    sites = [Site(address, 0), Site(address, 1), Site(address, 2, codec="dynamic8")]
    loops = [beside(site.train, 12) for site in sites]
    with refused("codec"):
        loops[2].result()
    assert torch.equal(loops[0].result(), loops[1].result())


def test_a_finished_worker_takes_part_in_exchanges_until_all_have_finished(address: str) -> None:
    sites = [Site(address, worker) for worker in range(3)]
    ends = zip(sites, (4, 12, 8), strict=True)
    found = [one.result() for one in [beside(site.train, end) for site, end in ends]]
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("after", ["start", "mean"])
@pytest.mark.parametrize(
    ("fragments", "number"), [(1, 1), (1, 2), (3, 5), (3, 7), (3, 8)]
)  # the first exchange in which all close, the last of each fragment, and the next one
def test_workers_end_with_the_same_bits_if_an_exchange_at_the_end_fails(
    address: str, fragments: int, number: int, after: str
) -> None:
    fault = {"at": "local.exchange", "after": after, "worker": 0, "number": number, "visit": 1}
    with failpoints(fault | {"do": "raise"}):
        found = trained(address, 2, 6, fragments=fragments)
    assert torch.equal(*found)


def test_the_port_of_torchfts_unpickling_transport_is_closed(address: str) -> None:
    site = Site(address, 0)
    port = site.manager._checkpoint_transport._server.socket.getsockname()[1]
    socket.create_connection(("127.0.0.1", port)).close()
    site.train(4)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def check_refused(**option: Any) -> str:
    """Assert that the manager is refused; return the hint."""
    model = net()
    with refused("manager") as caught:
        paceline.LocalUpdates(model, adamw(model), 4, **option)
    return caught.value.hint


def test_other_objects_and_a_missing_torchft_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_refused(manager=object())
    monkeypatch.setitem(sys.modules, "torchft", None)
    assert "paceline[elastic]" in check_refused(manager=object())


def test_managers_that_cannot_be_used_are_refused(address: str) -> None:
    background = manager_of(address, 0, use_async_quorum=True)
    check_refused(manager=background)
    background.shutdown()
    background._checkpoint_transport._server.server_close()  # torchft leaves the port open
    used = Site(address, 1)
    check_refused(manager=used.manager, process_group=dist.group.WORLD or object())
    used.train(4)
    check_refused(manager=used.manager)


@pytest.mark.parametrize("lighthouse", ["nowhere", "http://host.invalid:1"])
def test_a_lighthouse_without_an_address_is_refused(lighthouse: str) -> None:
    with refused("lighthouse"):
        _address_towards(lighthouse)
