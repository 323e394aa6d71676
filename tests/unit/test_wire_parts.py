"""The parts of the wire that need no network: books, credits, identities, what is logged."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import InvalidInput, WorkerLost
from paceline.wire import HubRestarted, Identity, Message
from paceline.wire.frames import HEADER_NBYTES, Header, Kind, Malformed
from paceline.wire.ledger import WINDOW, Ledger
from paceline.wire.outbox import Outbox
from paceline.wire.terms import Terms
from paceline.wire.texts import Complaints, one_line
from paceline.wire.traffic import Count, Traffic

SESSION, OTHER = b"session1", b"session2"
LARGEST = 1000
LAYOUT = "ab" * 32


class TestLedger:
    @given(st.lists(st.sampled_from(["send", "again", "answer", "arrive"]), max_size=60), st.data())
    def test_each_request_is_executed_once_whatever_comes_again(self, events, data):
        ledger, executed, answered, arrived, last = Ledger(LARGEST, 0), [], [], 0, 0
        for event in events:
            if event == "send" and last - arrived < WINDOW:
                last += 1
                if ledger.check(last, 0):
                    ledger.take(last, 0)
                    executed.append(last)
            elif event == "again" and last:
                assert not ledger.check(data.draw(st.integers(1, last)), 0)
            elif event == "answer" and len(answered) < len(executed):
                answered.append(executed[len(answered)])
                ledger.answer(answered[-1], Message("reply", answered[-1]))
            elif event == "arrive" and answered:
                arrived = data.draw(st.integers(0, answered[-1]))
                ledger.settle(arrived)
                arrived = max(arrived, 0)
        assert executed == list(range(1, last + 1))
        assert set(ledger.unacknowledged) <= set(answered)
        assert len(ledger.unacknowledged) <= WINDOW
        for sequence in ledger.unacknowledged:
            reply = ledger.reply(sequence)
            assert reply is not None
            assert reply.step == sequence

    def test_two_of_the_largest_requests_may_wait_for_replies(self):
        ledger = Ledger(LARGEST, 0)
        for sequence in (1, 2):
            assert ledger.check(sequence, LARGEST)
            ledger.take(sequence, LARGEST)
        assert ledger.check(3, 0)
        with pytest.raises(Malformed, match="credit is 2000"):
            ledger.check(3, 1)
        ledger.answer(1, Message("done"))
        assert ledger.check(3, LARGEST)
        with pytest.raises(Malformed, match="1001 bytes, more than 1000"):
            ledger.check(3, LARGEST + 1)

    def test_replies_that_nobody_acknowledges_are_bounded(self):
        ledger = Ledger(LARGEST, 5)
        for sequence in range(6, 6 + WINDOW):
            assert ledger.check(sequence, 0)
            ledger.take(sequence, 0)
            ledger.answer(sequence, Message("done"))
        with pytest.raises(Malformed, match="have not arrived"):
            ledger.check(100, 0)
        ledger.settle(6)
        assert ledger.check(100, 0)
        assert ledger.unacknowledged == list(range(7, 6 + WINDOW))

    def test_a_request_has_one_reply(self):
        ledger = Ledger(LARGEST, 0)
        ledger.take(1, 0)
        ledger.answer(1, Message("done"))
        for sequence in (1, 2):
            with pytest.raises(ValueError, match="not waiting"):
                ledger.answer(sequence, Message("done"))


def joined(largest: int = LARGEST) -> Outbox:
    outbox = Outbox()
    assert outbox.join(SESSION, largest, 0)
    return outbox


def blocks(action) -> tuple[threading.Thread, list]:
    """Start an action that must wait; return its thread, and where its result will be."""
    result: list = []

    def run() -> None:
        try:
            result.append(action())
        except Exception as error:
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    return thread, result


def parts(nbytes: int) -> Message:
    return Message("a", parts=(bytes(nbytes),))


class TestOutbox:
    def test_a_request_waits_until_its_bytes_fit_into_the_credit(self):
        outbox = joined()
        for nbytes in (LARGEST, LARGEST - 1):
            outbox.admit(parts(nbytes))
        outbox.admit(parts(1))
        thread, result = blocks(lambda: outbox.admit(parts(1)))
        outbox.answer(3, Message("done"))
        thread.join(10)
        assert result[0].sequence == 4
        with pytest.raises(InvalidInput, match="larger than the 1,000"):
            outbox.admit(parts(LARGEST + 1))

    def test_no_more_requests_are_open_than_the_hub_keeps_replies_for(self):
        outbox = joined()
        pending = [outbox.admit(Message("a")) for _ in range(WINDOW)]
        for one in pending[1:]:
            outbox.answer(one.sequence, Message("done"))
        assert outbox.arrived == 0
        thread, result = blocks(lambda: outbox.admit(Message("a")))
        outbox.answer(1, Message("done"))
        thread.join(10)
        assert result[0].sequence == WINDOW + 1
        assert outbox.arrived == WINDOW

    def test_after_a_new_connection_what_the_hub_lacks_is_sent_again(self):
        outbox = joined()
        pending = [outbox.admit(Message("a")) for _ in range(4)]
        assert [outbox.take() for _ in range(3)] == pending[:3]
        outbox.answer(2, Message("done"))
        assert outbox.join(SESSION, LARGEST, 1)
        assert [outbox.take() for _ in range(3)] == [pending[2], pending[3], None]
        assert not outbox.answer(2, Message("done"))  # it came over both connections

    def test_a_hub_that_began_anew_voids_what_it_does_not_know(self):
        outbox = joined()
        kept, void = outbox.admit(Message("a")), outbox.admit(Message("a"))
        outbox.answer(kept.sequence, Message("done"))
        thread, result = blocks(void.result)
        assert not outbox.join(OTHER, LARGEST, 0)
        thread.join(10)
        assert isinstance(result[0], HubRestarted)
        assert outbox.take() is None
        assert kept.result().topic == "done"
        assert outbox.admit(Message("a")).sequence == 3  # it was told: it has begun its step again

    def test_who_waits_for_nothing_hears_of_it_at_the_next_request(self):
        """Between two requests of one step: the second would mean nothing to the new hub."""
        outbox = joined()
        first = outbox.admit(Message("a"))
        outbox.answer(first.sequence, Message("done"))
        assert first.result()
        outbox.join(OTHER, LARGEST, 0)
        with pytest.raises(HubRestarted):
            outbox.admit(Message("a"))
        assert outbox.admit(Message("a")).sequence == 2

    def test_who_waits_for_credit_hears_of_it_too(self):
        outbox = joined()
        for _ in range(2):
            outbox.admit(parts(LARGEST))
        thread, result = blocks(lambda: outbox.admit(parts(LARGEST)))
        outbox.join(OTHER, LARGEST, 0)
        thread.join(10)
        assert isinstance(result[0], HubRestarted)

    def test_a_failure_is_for_all_who_wait_or_come_later(self):
        outbox = joined()
        pending = outbox.admit(parts(LARGEST))
        outbox.admit(parts(LARGEST))
        waiting = [blocks(pending.result), blocks(lambda: outbox.admit(parts(LARGEST)))]
        outbox.fail(WorkerLost("gone"))
        outbox.fail(WorkerLost("closed"))
        for thread, result in waiting:
            thread.join(10)
            assert str(result[0]) == "gone"
        with pytest.raises(WorkerLost, match="gone"):
            outbox.admit(Message("a"))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"run_id": ""}, "run id"),
        ({"run_id": "a\nb"}, "run id"),
        ({"layout": "AB" * 32}, "layout"),
        ({"worker": -1}, "worker"),
    ],
)
def test_identities_that_cannot_be_sent_are_refused(values, said):
    with pytest.raises(InvalidInput, match=said):
        Identity(**{"run_id": "run", "layout": LAYOUT, "worker": 0, **values})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"num_workers": 0}, "workers"),
        ({"largest_nbytes": 0}, "largest"),
        ({"settings": bytes(65537)}, "settings"),
    ],
)
def test_terms_that_cannot_be_kept_are_refused(values, said):
    right = {"num_workers": 1, "largest_nbytes": 1, "settings": b""}
    with pytest.raises(InvalidInput, match=said):
        Terms("run", LAYOUT, **{**right, **values}, lost_after_s=1, gone_after_s=1)


def test_traffic_counts_messages_when_they_are_complete_and_never_too_many_topics():
    traffic = Traffic()
    header = Header(Kind.REQUEST, topic="a", sizes=(10,))
    traffic.count_sent(header, bytes(4))
    assert traffic.by_topic() == {"a": Count(0, 4, 0, 0)}
    traffic.count_sent(Header(Kind.REQUEST, topic="a", sizes=(10,), offset=4), bytes(6))
    traffic.count_received(Header(Kind.BEAT), b"")
    assert traffic.by_topic() == {"a": Count(1, 10, 0, 0)}
    assert traffic.sent_nbytes == 10 + 2 * (HEADER_NBYTES + 11)
    assert traffic.received_nbytes == HEADER_NBYTES + 11
    for number in range(1000):
        traffic.count_received(Header(Kind.REQUEST, topic=str(number), sizes=(1,)), b"x")
    counts = traffic.by_topic()
    assert len(counts) < 70
    assert sum(count.received for count in counts.values()) == 1000


def test_a_flood_of_complaints_is_one_line():
    said: list[str] = []
    complaints = Complaints(said.append)
    for number in range(1000):
        complaints.add(f"what came\nfrom {number} \x1b[2J")
    assert said == ["what came from 0 [2J"]
    assert complaints.num_all == 1000


def test_a_text_of_others_is_one_line_of_bounded_length():
    assert one_line("a\n\tb\x00c\u202e") == "a b c"
    assert len(one_line("x" * 100_000)) < 400
