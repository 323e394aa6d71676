import pytest
from hypothesis import given
from hypothesis import strategies as st

from boxes import ExchangeOnly, box, chain
from paceline.core.calibration import Measurement, line_through
from paceline.core.errors import InvalidInput
from paceline.core.machine import Machine
from paceline.core.plan import Kind
from paceline.core.simulate import simulate
from paceline.core.strategy import Window
from paceline.strategies import EXCHANGES

SMALL, LARGE = 1024, 2**22

# A strategy, the latency in times of the large exchange without it, and the seconds of a byte.
cases = st.tuples(st.sampled_from(sorted(EXCHANGES)), st.floats(0, 50), st.floats(1e-12, 1e-6))


def exchange_s(machine: Machine, strategy: str, nbytes: int) -> float:
    """What the plan says of a step in which nothing but the exchange takes time."""
    known = EXCHANGES[strategy]
    config = known.config(workers=len(machine.devices))
    tasks = known.plan(chain((0, nbytes)), machine, config, Window(1))
    return simulate(tasks, ExchangeOnly(machine)).makespan_s


def measured(latency_s: float, seconds_per_byte: float) -> tuple[Measurement, Measurement]:
    small, large = (Measurement(n, latency_s + n * seconds_per_byte) for n in (SMALL, LARGE))
    return small, large


def check(machine: Machine, strategy: str, latency: float, seconds_per_byte: float) -> None:
    latency_s = latency * LARGE * seconds_per_byte
    found = EXCHANGES[strategy].calibrate(machine, measured(latency_s, seconds_per_byte))
    for nbytes in (SMALL, 100_000, LARGE, 20 * LARGE):
        expected = latency_s + nbytes * seconds_per_byte
        assert exchange_s(found, strategy, nbytes) == pytest.approx(expected, rel=1e-9)


@given(cases, st.integers(2, 8))
def test_cores_of_one_host_exchange_as_measured(case, workers):
    device = {"memory_bandwidth_bytes_per_s": 1e9}
    check(box(*["cpu"] * workers, device=device, host=device), *case)


@given(cases, st.integers(2, 8))
def test_gpus_exchange_as_measured(case, workers):
    check(box(*["gpu"] * workers), *case)


@given(cases, st.integers(1, 3), st.integers(1, 3))
def test_several_hosts_exchange_as_measured(case, first, second):
    for kind in ("cpu", "gpu"):
        check(box(*[kind] * (first + second), hosts="a" * first + "b" * second), *case)


def test_what_additions_take_on_gpus_is_no_links():
    device = {"memory_bandwidth_bytes_per_s": 3e9, "call_latency_s": 1e-5}
    check(box("gpu", "gpu", device=device), "tree", 0.1, 5e-9)


@pytest.mark.parametrize("strategy", sorted(EXCHANGES))
@pytest.mark.parametrize("large_s", [1e-3, 0.5e-3, 1e-9])
def test_noise_that_makes_the_large_exchange_the_faster_gives_a_machine_nevertheless(
    strategy, large_s
):
    noisy = (Measurement(SMALL, 1e-3), Measurement(LARGE, large_s))
    found = EXCHANGES[strategy].calibrate(box("cpu", "cpu"), noisy)
    assert Machine.model_validate(found.model_dump()) == found
    assert exchange_s(found, strategy, LARGE) > 0


@pytest.mark.parametrize("strategy", sorted(EXCHANGES))
def test_only_cores_of_one_host_carry_their_messages_themselves(strategy):
    calibrate = EXCHANGES[strategy].calibrate
    cases = {
        True: [box("cpu", "cpu")],
        False: [box("gpu", "gpu"), box("cpu", "cpu", "cpu", hosts="aab")],
    }
    for expected, machines in cases.items():
        for machine in machines:
            links = calibrate(machine, measured(1e-4, 1e-9)).links
            assert links
            assert {link.uses_cores for link in links} == {expected}


def test_a_calibrated_link_of_a_ring_is_the_one_that_was_measured():
    # Four ranks: six messages in turn, and all four send 6/4 of the bytes through one link.
    latency_s, nbytes_per_s = 2e-4, 1.7e9
    found = EXCHANGES["allreduce"].calibrate(
        box(*["cpu"] * 4), measured(6 * latency_s, 6 / nbytes_per_s)
    )
    (link,) = found.links
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
    latency_s, seconds_per_byte = 3e-3, 2e-8
    found = known.calibrate(machine, measured(latency_s, seconds_per_byte), config)
    for nbytes in (SMALL, LARGE, 20 * LARGE):  # what is beyond a piece was measured in pieces
        tasks = known.plan(chain((0, nbytes)), found, config, Window(1))
        assert not {task.kind for task in tasks.tasks} & {Kind.ENCODE, Kind.DECODE}
        expected = latency_s + nbytes * seconds_per_byte
        found_s = simulate(tasks, ExchangeOnly(found)).makespan_s
        # Blocks that are not full are rounded up.
        assert found_s == pytest.approx(expected, rel=1e-2 if nbytes == SMALL else 1e-3)


def test_a_trace_of_a_run_with_a_codec_has_the_spans_of_one_without():
    # The recorder notes an exchange as a whole.
    known, machine = EXCHANGES["allreduce"], box("cpu", "cpu")
    config = known.config(codec="dynamic8")
    work = chain((0, LARGE), (0, 40 * LARGE))
    found = known.calibrate(machine, measured(1e-4, 1e-9), config)
    plain = known.calibrate(machine, measured(1e-4, 1e-9))
    encoded = known.plan(work, found, config, Window(2))
    unencoded = known.plan(work, plain, known.config(), Window(2))
    assert [task.id for task in encoded.tasks] == [task.id for task in unencoded.tasks]
    # Codes and scales of the gradients: so much is on the wire.
    sent = 2 * 40 * LARGE / 4 * (1 + 4 / 1024)
    assert encoded["s0/reduce[0]"].cost.nbytes == pytest.approx(sent)


def test_a_measured_codec_is_no_other_codec():
    known, machine = EXCHANGES["allreduce"], box("cpu", "cpu")
    found = known.calibrate(machine, measured(1e-4, 1e-9), known.config(codec="dynamic8"))
    with pytest.raises(
        InvalidInput, match="nothing says how fast device 'cpu0' is with kernel 'on"
    ):
        known.plan(chain((0, 4)), found, known.config(codec="onebit"), Window(1))


def test_the_line_goes_through_both_exchanges():
    line = line_through((Measurement(1000, 3.0), Measurement(3000, 5.0)))
    assert line == (2.0, 0.001)


def test_what_is_known_of_the_devices_stays():
    machine = box("cpu", "cpu", device={"memory_bandwidth_bytes_per_s": 7e9})
    for strategy in EXCHANGES.values():
        assert strategy.calibrate(machine, measured(1e-4, 1e-9)).devices == machine.devices
