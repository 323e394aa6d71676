"""Hub and workers over sockets: each request is executed once despite kills and partitions."""

import threading
from contextlib import closing
from pathlib import Path

import pytest
import zmq

from paceline.core.errors import WorkerLost
from paceline.rpc.frames import Message, MessageKind
from paceline.rpc.keys import generate_keys, load_hub_keys, load_worker_keys
from paceline.rpc.server import Joined, Lost, RpcRequest, Server
from paceline.rpc.sockets import Connection
from refusals import refused
from rpc_exchange import (
    DEADLINE_S,
    MIB,
    Clock,
    Hub,
    Proxy,
    Raw,
    beside,
    client_of,
    limits_of,
    until,
    work,
)

NEVER_S = 1e9


def test_every_request_is_executed_once_and_counted():
    """Two workers send messages of several pieces, whose parts end within pieces."""
    nbytes, steps = 700_001, 4
    with Hub(2, nbytes) as hub:
        both = [beside(work, hub.port, steps, nbytes, worker=number) for number in range(2)]
        ends = [one.result(DEADLINE_S) for one in both]
    hub.check_done(steps)
    # Workers send pushes and receive parameters; fetch requests and replies to pushes are empty.
    assert sum(end.sent for end in ends) == hub.server.received_nbytes
    assert sum(end.received for end in ends) <= hub.server.sent_nbytes
    for end in ends:
        assert 1 < end.sent / (steps * nbytes) < 1.005
        assert 1 < end.received / ((steps + 1) * nbytes) < 1.005


def test_cut_connections_do_not_change_the_result():
    nbytes, steps = MIB, 5
    with Hub(1, nbytes) as hub, Proxy(hub.port, 0.002) as between:
        worker = beside(work, between.port, steps, nbytes)
        for share in (0.3, 1.2, 0.7, 2.1, 0.5):  # in the middle of messages, in both directions
            between.wait_for(int(share * nbytes))
            between.cut()
        worker.result(DEADLINE_S)
        until(lambda: hub.lost)
    assert between.num_connections >= 5
    hub.check_done(steps)
    assert (hub.joined, hub.lost) == ([0], [(0, "has left")])


def test_a_partition_does_not_change_the_result():
    """The hub is silent for longer than the heartbeat limit in the middle of a push."""
    nbytes, steps, clock = MIB, 3, Clock()
    with Hub(1, nbytes) as hub, Proxy(hub.port, 0.002) as between:
        worker = beside(work, between.port, steps, nbytes, clock=clock, deadline_s=NEVER_S)
        between.wait_for(int(1.5 * nbytes))
        between.stop()
        clock.tick_s = 0.2
        until(lambda: between.num_connections > 1)
        clock.tick_s = 0.0
        between.go_on()
        worker.result(DEADLINE_S)
    hub.check_done(steps)


def test_a_silent_worker_is_lost_after_a_minute_and_one_with_heartbeats_is_not():
    """The silent worker stops in the middle of a push; another process may take its number."""
    clock, other = Clock(), Clock()
    limits = limits_of(2, MIB)
    with closing(Server("tcp://127.0.0.1:0", limits, keys=None, clock=clock)) as server:
        port = int(server.address.rpartition(":")[2])
        living = client_of(port, 1, clock=other, deadline_s=NEVER_S)
        with closing(living), Raw(port) as silent:
            silent.join()
            silent.half_a_push(1, 200_000)
            until(lambda: server.received_nbytes > 100_000)
            assert {server.receive(DEADLINE_S) for _ in range(2)} == {Joined(0), Joined(1)}
            for _ in range(2):
                clock.now_s += 29.9
                silent.receive(MessageKind.HEARTBEAT)
                before = server.received_nbytes
                other.now_s += 1.1  # the next heartbeat of `living` is due
                until(lambda before=before: server.received_nbytes > before)
            assert server.receive(0.0) is None
            clock.now_s += 1.1
            assert server.receive(DEADLINE_S) == Lost(0, "was silent for 60 s")
            living.request(Message("still here"))
            assert isinstance(server.receive(DEADLINE_S), RpcRequest)
            with Raw(port) as another:
                another.join()
                assert server.receive(DEADLINE_S) == Joined(0)
                another.push(1)
                assert server.receive(DEADLINE_S).message.parts == (b"a push",)


def test_a_worker_that_was_silent_for_five_seconds_can_be_replaced():
    clock = Clock()
    with Hub(clock=clock) as hub, Raw(hub.port) as first, Raw(hub.port) as second:
        token, _ = first.join()
        clock.now_s += 4.9
        second.hello()
        assert second.receive(MessageKind.BUSY)[1]
        clock.now_s += 0.2
        assert second.join()[0] != token
    assert hub.joined == [0, 0]
    assert hub.lost == [(0, "was replaced by another process")]


def test_a_second_worker_with_the_same_number_waits_until_its_deadline():
    clock = Clock()
    with Hub() as hub:
        with closing(client_of(hub.port)):
            second = beside(client_of, hub.port, clock=clock, deadline_s=5.0)
            until(lambda: hub.server.refusals.num_total)
            clock.tick_s = 0.2
            with pytest.raises(WorkerLost):
                second.result(DEADLINE_S)
        assert hub.joined == [0]


def test_a_worker_of_another_run_is_refused(caplog):
    with Hub() as hub:
        for wrong in ({"run": "another"}, {"worker": 1}):
            with refused("hub"):
                client_of(hub.port, **wrong)
        with Raw(hub.port) as older:
            older.hello(release="paceline 0.0")
            older.receive(MessageKind.REFUSED)
        work(hub.port)
    assert hub.joined == [0]
    assert hub.server.refusals.num_total == 3
    assert "another" in caplog.text


def test_only_workers_with_known_keys_are_accepted(caplog, tmp_path: Path):
    ours, others, mixed = (tmp_path / name for name in ("ours", "others", "mixed"))
    for folder in (ours, others, mixed):
        generate_keys(folder)
    (mixed / "hub.pub").write_bytes((ours / "hub.pub").read_bytes())  # strangers may have it
    with Hub(keys=load_hub_keys(ours)) as hub:
        with refused("keys"):
            client_of(hub.port, keys=load_worker_keys(mixed))
        for keys in (load_worker_keys(others), None):  # the first keys are another hub's
            with pytest.raises(WorkerLost):
                client_of(hub.port, keys=keys, deadline_s=2.0, clock=Clock(0.1))
        work(hub.port, keys=load_worker_keys(ours))
    assert hub.joined == [0]
    hub.check_done(3)
    assert "unknown key from 127.0.0.1" in caplog.text


def test_a_worker_repeats_its_hello_every_five_seconds_until_its_deadline():
    received = 0
    with zmq.Context.instance().socket(zmq.ROUTER) as mute:
        port = mute.bind_to_random_port("tcp://127.0.0.1")
        with pytest.raises(WorkerLost, match=f"127.0.0.1:{port}"):
            client_of(port, deadline_s=11.0, clock=Clock(0.2))
        while mute.poll(200):
            mute.recv_multipart()
            received += 1
    assert received >= 2


def test_the_time_of_a_stopped_process_is_no_waiting_time(monkeypatch: pytest.MonkeyPatch):
    clock, poll = Clock(), Connection.poll

    def stopped(*arguments: object, **options: object) -> None:
        poll(*arguments, **options)
        clock.now_s += 1000

    monkeypatch.setattr(Connection, "poll", stopped)
    with Hub() as hub, Proxy(hub.port) as between:
        work(between.port, clock=clock, deadline_s=60.0)
        assert between.num_connections == 1
    hub.check_done(3)


def test_closing_leaves_no_descriptor_or_thread():
    """Also after the hub has closed, with unsent and unanswered messages."""

    def open_and_close() -> tuple[int, int]:
        hub, clock = Hub(nbytes=16 * MIB, ends_after=1), Clock()
        with closing(client_of(hub.port, clock=clock, deadline_s=10.0)) as client:
            assert client.request(Message("fetch")).result().parts
            pending = client.request(Message("push"))
            hub.ended.result(DEADLINE_S)
            hub.server.close()
            hub.server.close()
            client.request(Message("never received", parts=(bytes(16 * MIB),)))
            clock.tick_s = 0.2
            with pytest.raises(WorkerLost):
                pending.result()
            with pytest.raises(WorkerLost):
                client.request(Message("push"))
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    before = open_and_close()
    for _ in range(4):
        found = open_and_close()
    assert all(now <= then for now, then in zip(found, before, strict=True))
