"""Links that are fitted to measured exchanges: plans then take as long as was measured."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from boxes import box, chain, exchange_s
from paceline.core.calibration import Measurement, line_through
from paceline.core.machine import Machine
from paceline.core.plan import Kind
from paceline.core.strategy import Window
from paceline.strategies import EXCHANGES
from refusals import refused

SMALL, LARGE = 1024, 2**22


def measured(latency_s: float, seconds_per_byte: float) -> tuple[Measurement, Measurement]:
    small, large = (Measurement(n, latency_s + n * seconds_per_byte) for n in (SMALL, LARGE))
    return small, large


def planned(machine: Machine, strategy: str, nbytes: int, **config):
    known = EXCHANGES[strategy]
    options = known.config(workers=len(machine.devices), **config)
    return known.plan(chain((0, nbytes)), machine, options, Window(1))


@given(
    st.sampled_from(sorted(EXCHANGES)),
    st.sampled_from(["cpu", "gpu"]),
    st.sampled_from(["aa", "aaa", "a" * 8, "ab", "aab", "abbb", "aaabbb"]),
    st.floats(0, 50),  # the latency in times of the large exchange without it
    st.floats(1e-12, 1e-6),
    st.sampled_from([1e-18, 1e-9]),  # seconds of a byte in memory
)
def test_workers_exchange_as_measured(strategy, kind, places, latency, s_per_byte, memory_s):
    latency_s = latency * LARGE * s_per_byte
    # Only cores of one host carry their messages, and so their sums, themselves.
    carried = kind == "cpu" and set(places) == {"a"}
    facts = {"memory_bandwidth_bytes_per_s": 1 / memory_s} if carried else {}
    machine = box(*[kind] * len(places), hosts=places, device=facts, host=facts)
    found = EXCHANGES[strategy].calibrate(machine, measured(latency_s, s_per_byte))
    assert found.devices == machine.devices
    assert {one.uses_cores for one in found.links} == {carried}
    for nbytes in (SMALL, 100_000, LARGE, 20 * LARGE):
        expected = latency_s + nbytes * s_per_byte
        tasks = planned(found, strategy, nbytes)
        assert exchange_s(tasks, found) == pytest.approx(expected, rel=1e-9)


def test_what_additions_take_on_gpus_is_no_links():
    device = {"memory_bandwidth_bytes_per_s": 3e9, "call_latency_s": 1e-5}
    known = measured(0.1 * LARGE * 5e-9, 5e-9)
    found = EXCHANGES["tree"].calibrate(box("gpu", "gpu", device=device), known)
    assert exchange_s(planned(found, "tree", LARGE), found) == pytest.approx(known[1].seconds)


@pytest.mark.parametrize("strategy", sorted(EXCHANGES))
@pytest.mark.parametrize("large_s", [1e-3, 0.5e-3, 1e-9])
def test_noise_that_makes_the_large_exchange_the_faster_gives_a_machine_nevertheless(
    strategy, large_s
):
    noisy = (Measurement(SMALL, 1e-3), Measurement(LARGE, large_s))
    found = EXCHANGES[strategy].calibrate(box("cpu", "cpu"), noisy)
    assert Machine.model_validate(found.model_dump()) == found
    assert exchange_s(planned(found, strategy, LARGE), found) > 0


def test_a_calibrated_link_of_a_ring_is_the_one_that_was_measured():
    # Four ranks: six messages in turn, and all four send 6/4 of the bytes through one link.
    latency_s, nbytes_per_s = 2e-4, 1.7e9
    known = measured(6 * latency_s, 6 / nbytes_per_s)
    (link,) = EXCHANGES["allreduce"].calibrate(box(*["cpu"] * 4), known).links
    assert link.bandwidth_bytes_per_s == pytest.approx(nbytes_per_s, rel=1e-9)
    assert link.latency_s == pytest.approx(latency_s, rel=1e-9)


@pytest.mark.parametrize("codec", ["half", "dynamic8", "e3m0", "onebit", "auto"])
@pytest.mark.parametrize(
    ("strategy", "kind", "places"),
    [
        ("allreduce", "cpu", "aa"),
        ("allreduce", "cpu", "aab"),
        ("allreduce", "gpu", "ab"),
        ("host", "cpu", "aab"),
        ("host", "gpu", "ab"),
        ("host", "cpu", "aa"),
    ],
)
def test_an_exchange_that_was_measured_with_a_codec_takes_as_long_with_it(
    strategy, kind, places, codec
):
    known, machine = EXCHANGES[strategy], box(*[kind] * len(places), hosts=places)
    config = known.config(workers=len(places), codec=codec)
    found = known.calibrate(machine, measured(3e-3, 2e-8), config)
    for nbytes in (SMALL, LARGE, 20 * LARGE):  # what is beyond a piece was measured in pieces
        tasks = planned(found, strategy, nbytes, codec=codec)
        assert not {task.kind for task in tasks.tasks} & {Kind.ENCODE, Kind.DECODE}
        # Blocks that are not full are rounded up.
        close = pytest.approx(3e-3 + nbytes * 2e-8, rel=1e-2 if nbytes == SMALL else 1e-3)
        assert exchange_s(tasks, found) == close


def test_a_trace_of_a_run_with_a_codec_has_the_spans_of_one_without():
    # The recorder notes an exchange as a whole.
    known, machine = EXCHANGES["allreduce"], box("cpu", "cpu")
    work = chain((0, LARGE), (0, 40 * LARGE))
    plans = []
    for codec in ("dynamic8", None):
        config = known.config(codec=codec)
        found = known.calibrate(machine, measured(1e-4, 1e-9), config)
        plans.append(known.plan(work, found, config, Window(2)))
        if codec:
            with refused("codec"):  # what was measured is no other codec
                known.plan(work, found, known.config(codec="onebit"), Window(1))
    encoded, plain = plans
    assert [task.id for task in encoded.tasks] == [task.id for task in plain.tasks]
    # Codes and scales of the gradients: so much is on the wire.
    sent = 2 * 40 * LARGE / 4 * (1 + 4 / 1024)
    assert encoded["s0/reduce[0]"].cost.nbytes == pytest.approx(sent)


def test_the_line_goes_through_both_exchanges():
    assert line_through((Measurement(1000, 3.0), Measurement(3000, 5.0))) == (2.0, 0.001)
