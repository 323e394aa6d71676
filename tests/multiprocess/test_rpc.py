"""Hub and workers as real processes: each request once, and only from workers of the run."""

import re
from pathlib import Path

from paceline.rpc.keys import generate_keys
from rpc_exchange import MIB, PROGRAMS, executed, expected, free_port, line_of, outcome


def test_every_request_is_executed_once_and_counted(hub, worker):
    """Two workers; messages of more than one piece, of parts that end within pieces."""
    nbytes, steps = 700_001, 4
    served, port = hub(workers=2, nbytes=nbytes)
    both = [worker(port, worker=number, steps=steps, nbytes=nbytes) for number in range(2)]
    ends = [outcome(one)[-1] for one in both]
    told = outcome(served)
    assert told[-1]["states"] == {str(w): expected(w, steps, nbytes) for w in range(2)}
    assert [executed(told, w) for w in range(2)] == [list(range(steps))] * 2
    # A worker sends pushes and receives parameters; a push has an empty reply, a fetch no payload.
    assert sum(end["sent"] for end in ends) == told[-1]["received"]
    assert sum(end["received"] for end in ends) <= told[-1]["sent"]
    for end in ends:
        assert 1 < end["sent"] / (steps * nbytes) < 1.005
        assert 1 < end["received"] / ((steps + 1) * nbytes) < 1.005


def test_a_second_worker_with_the_same_number_is_refused(hub, worker, proxy):
    served, port = hub(nbytes=MIB)
    between = proxy(port, 0.01)
    first = worker(between.port, steps=8, nbytes=MIB)
    assert line_of(first) == {"joined": True}
    second = worker(port, steps=8, nbytes=MIB, deadline_s=1.0).finish(30)
    assert second.code == 1
    assert "WorkerLost" in second.err
    assert "the hub has a worker 0 already" in second.err
    outcome(first)
    told = outcome(served)
    assert executed(told) == list(range(8))
    assert [one["joined"] for one in told if "joined" in one] == [0]


def test_a_worker_of_another_run_is_told_the_difference(hub, worker):
    served, port = hub()
    for wrong, said in [
        ({"run": "another"}, "the hub's run is 'a-run', this worker's 'another'"),
        ({"layout": "0" * 64}, "this worker's 000000000000"),
        ({"worker": 1}, "1 is not one of 0 to 0"),
    ]:
        done = worker(port, **wrong).finish(30)
        assert done.code == 1
        assert done.err.splitlines()[-1].startswith("InvalidInput: the hub refuses this worker: ")
        assert said in done.err
    outcome(worker(port))
    told = outcome(served)
    assert [one["joined"] for one in told if "joined" in one] == [0]
    assert any("another" in one.get("said", "") for one in told)


def test_only_workers_with_known_keys_are_accepted(hub, worker, tmp_path: Path):
    ours, others = tmp_path / "ours", tmp_path / "others"
    generate_keys(ours)
    generate_keys(others)
    served, port = hub(keys=str(ours), nbytes=MIB)
    mixed = tmp_path / "mixed"  # a stranger who knows the hub's public key
    mixed.mkdir()
    (mixed / "hub.pub").write_bytes((ours / "hub.pub").read_bytes())
    (mixed / "worker.key").write_bytes((others / "worker.key").read_bytes())
    (mixed / "worker.key").chmod(0o600)
    stranger = worker(port, keys=str(mixed)).finish(30)
    assert stranger.code == 1
    assert re.search("InvalidInput: .* does not know this worker's key", stranger.err)
    misled = worker(port, keys=str(others), deadline_s=0.8).finish(30)  # would talk to another hub
    assert misled.code == 1
    assert "WorkerLost: no hub at" in misled.err
    plain = worker(port, deadline_s=0.8).finish(30)
    assert plain.code == 1
    assert "WorkerLost: no hub at" in plain.err
    outcome(worker(port, keys=str(ours), nbytes=MIB, steps=3))
    told = outcome(served)
    assert executed(told) == list(range(3))
    assert told[-1]["states"] == {"0": expected(0, 3, MIB)}
    assert [one["joined"] for one in told if "joined" in one] == [0]
    said = [one["said"] for one in told if "said" in one]
    assert any("unknown key from 127.0.0.1" in text for text in said)


def test_a_worker_without_a_hub_gives_up_at_its_deadline(worker):
    done = worker(free_port(), deadline_s=0.5).finish(30)
    assert done.code == 1
    assert re.search(
        r"WorkerLost: no hub at tcp://127\.0\.0\.1:\d+ has taken worker 0 in", done.err
    )


def test_closing_leaves_no_descriptor_or_thread(start):
    """Descriptors and threads are what they were, also when what was sent never goes out."""
    program = start(str(PROGRAMS / "rpc_closing.py"), str(free_port()))
    told = outcome(program)
    assert told[-1]["after"] == told[-1]["before"]
