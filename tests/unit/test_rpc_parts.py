"""Parts of rpc that need no network: sessions, credits, queues, limits, log and keys."""

import logging
import os
import stat
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.rpc.client import Client, HubRestarted, Outbox
from paceline.rpc.frames import (
    FrameHeader,
    Message,
    MessageKind,
    MessagePiece,
    ProtocolError,
    unpack,
)
from paceline.rpc.keys import (
    bind_address,
    connect_address,
    generate_keys,
    load_hub_keys,
    load_worker_keys,
)
from paceline.rpc.limits import WINDOW, Limits, RateLimitedLog, check_run_name
from paceline.rpc.session import WorkerSession
from refusals import refused
from rpc_exchange import DEADLINE_S, Clock, beside

SESSION, OTHER = b"session1", b"session2"
MAX_NBYTES = 1000


def session() -> WorkerSession:
    return WorkerSession(0, Limits("run", num_workers=1, max_message_nbytes=MAX_NBYTES), 0)


def send(to: WorkerSession, sequence: int, nbytes: int = 0) -> Message | None:
    """Send a request to a session; return it if the hub executes it."""
    return to.receive(
        FrameHeader(MessageKind.REQUEST, sequence=sequence, sizes=(nbytes,)), bytes(nbytes)
    )


class TestSession:
    @given(
        st.lists(st.sampled_from(["send", "repeat", "reply", "acknowledge"]), max_size=60),
        st.data(),
    )
    def test_each_request_is_executed_once_however_often_it_is_sent(self, events, data):
        hub, executed, replied, acknowledged, last = session(), [], [], 0, 0
        for event in events:
            if event == "send" and last - acknowledged < WINDOW:
                last += 1
                if send(hub, last):
                    executed.append(last)
            elif event == "repeat" and last:
                assert not send(hub, data.draw(st.integers(1, last)))
            elif event == "reply" and len(replied) < len(executed):
                replied.append(executed[len(replied)])
                hub.reply(replied[-1], Message("reply", replied[-1]))
            elif event == "acknowledge" and replied:
                drawn = data.draw(st.integers(0, replied[-1]))  # old ones change nothing
                hub.acknowledge(drawn)
                acknowledged = max(acknowledged, drawn)
        assert executed == list(range(1, last + 1))
        assert hub.unacknowledged == [one for one in replied if one > acknowledged]
        assert len(hub.unacknowledged) <= WINDOW
        hub.connect(b"route")
        sent: list[MessagePiece] = []
        for sequence in hub.unacknowledged:
            assert hub.outgoing.send(lambda piece: False) is False  # the piece stays the next one
            assert hub.outgoing.send(lambda piece: not sent.append(piece))
            header = unpack(*sent[-1])
            assert (header.sequence, header.step) == (sequence, sequence)
        assert hub.outgoing.send(lambda piece: True) is None

    def test_at_most_two_requests_of_the_largest_size_may_wait_for_replies(self):
        hub = session()
        for sequence in (1, 2):
            assert send(hub, sequence, MAX_NBYTES)
        with pytest.raises(ProtocolError):
            send(hub, 3, 1)
        assert send(hub, 3, 0)
        hub.reply(1, Message("done"))
        with pytest.raises(ProtocolError):
            send(hub, 4, MAX_NBYTES + 1)
        assert send(hub, 4, MAX_NBYTES)


def joined() -> Outbox:
    outbox = Outbox()
    outbox.join(SESSION, MAX_NBYTES, 0)
    return outbox


def blocks(action: Callable[[], Any]) -> Future[Any]:
    """Start an action that must wait; return its future result."""
    result = beside(action)
    assert not wait([result], 0.05).done
    return result


def parts(nbytes: int) -> Message:
    return Message("a", parts=(bytes(nbytes),))


class TestOutbox:
    def test_a_request_waits_until_it_fits_into_the_credit(self):
        outbox = joined()
        for nbytes in (MAX_NBYTES, MAX_NBYTES - 1):
            outbox.admit(parts(nbytes))
        outbox.admit(parts(1))
        waiting = blocks(lambda: outbox.admit(parts(1)))
        outbox.answer(3, Message("done"))
        assert waiting.result(DEADLINE_S).sequence == 4
        with refused("request"):
            outbox.admit(parts(MAX_NBYTES + 1))

    def test_the_window_bounds_the_requests_without_acknowledged_reply(self):
        outbox = joined()
        pending = [outbox.admit(Message("a")) for _ in range(WINDOW)]
        for one in pending[1:]:
            outbox.answer(one.sequence, Message("done"))
        assert outbox.acknowledged == 0
        waiting = blocks(lambda: outbox.admit(Message("a")))
        outbox.answer(1, Message("done"))
        assert waiting.result(DEADLINE_S).sequence == WINDOW + 1
        assert outbox.acknowledged == WINDOW

    def test_a_new_connection_repeats_requests_that_the_hub_lacks(self):
        outbox = joined()
        pending = [outbox.admit(Message("a")) for _ in range(4)]
        assert [outbox.take() for _ in range(3)] == pending[:3]
        outbox.answer(2, Message("done"))
        outbox.join(SESSION, MAX_NBYTES, 1)
        assert [outbox.take() for _ in range(3)] == [pending[2], pending[3], None]
        outbox.answer(2, Message("done"))  # the reply came over both connections

    def test_a_restarted_hub_voids_the_requests_it_does_not_know(self):
        outbox = joined()
        kept, void = outbox.admit(Message("a")), outbox.admit(Message("a"))
        outbox.answer(kept.sequence, Message("done"))
        waiting = blocks(void.result)
        assert outbox.join(SESSION, MAX_NBYTES, 1)
        assert not outbox.join(OTHER, MAX_NBYTES, 0)
        with pytest.raises(HubRestarted):
            waiting.result(DEADLINE_S)
        assert outbox.take() is None
        assert kept.result().topic == "done"
        assert outbox.admit(Message("a")).sequence == 3

    def test_a_waiting_request_is_refused_if_the_restarted_hub_takes_only_smaller_ones(self):
        outbox = joined()
        for _ in range(2):
            outbox.admit(parts(MAX_NBYTES))
        waiting = blocks(lambda: outbox.admit(parts(MAX_NBYTES)))
        outbox.join(OTHER, MAX_NBYTES - 1, 0)
        with refused("request"):
            waiting.result(DEADLINE_S)


@pytest.mark.parametrize(
    ("field", "make"),
    [
        ("run_name", lambda: check_run_name("")),
        ("run_name", lambda: Limits("a\nb", 1, 1)),
        ("settings", lambda: Limits("run", 1, 1, settings=bytes(65537))),
    ],
)
def test_invalid_names_and_limits_are_refused(field: str, make):
    Limits("run", 1, 1, settings=bytes(65536))
    with refused(field):
        make()


def test_a_flood_of_warnings_is_logged_as_one_line_every_five_seconds(caplog):
    clock = Clock()
    log = RateLimitedLog(logging.getLogger("paceline.rpc.test"), clock)
    for number in range(1000):
        log.warning(f"what\tcame\nfrom {number} \x1b[2J\u202e")
    clock.now_s += 4.9
    log.flush()
    assert caplog.messages == [r"what\tcame from 0 \x1b[2J\u202e"]
    clock.now_s += 0.2
    log.flush()
    log.flush()
    assert len(caplog.messages) == 2
    assert "999" in caplog.messages[1]
    assert log.num_total == 1000


def test_generated_keys_are_private_never_overwritten_and_a_worker_needs_no_secret_of_the_hub(
    tmp_path: Path,
):
    before = os.umask(0)
    try:
        written = generate_keys(tmp_path)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in written}
    secret, public = ("hub.key", "worker.key"), ("hub.pub", "worker.pub")
    assert modes == dict.fromkeys(secret, 0o600) | dict.fromkeys(public, 0o644)
    hub = load_hub_keys(tmp_path)
    with refused(tmp_path / "hub.key"):
        generate_keys(tmp_path)
    assert load_hub_keys(tmp_path) == hub
    (tmp_path / "hub.key").unlink()
    client = load_worker_keys(tmp_path)
    assert hub.workers == {client.public}
    assert hub.secret.decode() not in repr(hub)
    assert client.secret.decode() not in repr(client)


@pytest.mark.parametrize(
    ("spoil", "field"),
    [
        (lambda folder: (folder / "hub.key").unlink(), "hub.key"),
        (lambda folder: (folder / "hub.key").chmod(0o640), "hub.key"),
        (lambda folder: (folder / "hub.key").write_text(""), "hub.key"),
        (lambda folder: (folder / "worker.pub").write_text("hello\n"), "worker.pub"),
        (lambda folder: (folder / "worker.pub").unlink(), None),
    ],
)
def test_keys_that_cannot_be_used_are_refused(tmp_path: Path, spoil, field: str | None):
    generate_keys(tmp_path)
    spoil(tmp_path)
    with refused(tmp_path / field if field else "keys"):
        load_hub_keys(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        *("10.0.0.1:5555", "tcp://10.0.0.1", "tcp://:5555", "tcp://*:5555", "tcp://1.2.3.4:65536"),
        *("tcp://1.2.3.4:-1", "tcp://1.2.3.4:٣", "tcp://::1:80", "ipc://x:1", "tcp://a;b:1", ""),
    ],
)
def test_invalid_addresses_are_refused(text: str):
    for right in ("tcp://10.0.0.1:5555", "tcp://[fe80::1]:1", "tcp://a.b:65535"):
        assert connect_address(right, has_keys=True) == right
    for option, check in (("listen", bind_address), ("connect", connect_address)):
        with refused(option):
            check(text, has_keys=True)


def test_a_hub_binds_never_all_interfaces_and_without_keys_only_loopback():
    for plain in ("tcp://127.0.0.1:0", "tcp://[::1]:0", "tcp://localhost:0"):
        assert "localhost" not in bind_address(plain, has_keys=False)
    wide = [(f"tcp://{host}:5555", True) for host in ("0.0.0.0", "[::]", "a.name")]
    for text, has_keys in [*wide, ("tcp://10.0.0.1:5555", False)]:
        with refused("listen"):
            bind_address(text, has_keys=has_keys)
    with refused("listen", hint=""):  # with keys, too, no hub may listen on all interfaces
        bind_address("tcp://0.0.0.0:5555", has_keys=False)
    assert connect_address("tcp://localhost:5555", has_keys=False)
    with refused("connect"):
        connect_address("tcp://hub.example:5555", has_keys=False)
    with refused("connect"):
        Client("tcp://127.0.0.1:0", "run", 0, keys=None, deadline_s=1)
