"""The slowest second machine and link that pay, against closed forms and an exhaustive search.

One host computes a batch in `COMPUTE_S`. With a second host of relative speed s, a batch takes
COMPUTE_S / (1 + s). An all-reduce between two hosts takes NBYTES / bandwidth.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace

import pytest

from boxes import FLOPS_PER_S, box, chain, codec_speed, link
from paceline.core.machine import Machine
from paceline.core.workload import Workload
from paceline.planner.second_machine import BANDWIDTHS, SPEEDS, SecondMachine, second_machine

COMPUTE_S, NBYTES, BATCH = 1.0, 400_000_000, 1000
GIGABYTE = 1e9
_ROOM = {"memory_bytes": 1e12}
_FASTER = 1e6  # speed relative to `boxes`, so that weight updates take no time
EIGHT_BITS = {"codecs": {"eightbit": codec_speed(1e18, 1e18)}}


def workload(fixed_s: float = 0.0) -> Callable[[int], Workload]:
    """Return workloads of one layer: `COMPUTE_S` per batch, and `fixed_s` for any batch."""

    def of(samples: int) -> Workload:
        layers = chain((_FASTER * (fixed_s + COMPUTE_S * samples / BATCH), NBYTES))
        return replace(layers, batch_size=samples)

    return of


def hosts(nbytes_per_s: float, device: dict | None = None, kinds: str = "ab") -> Machine:
    joined = [link("a", "b", nbytes_per_s)] if len(set(kinds)) > 1 else []
    device = _ROOM | {"flops_per_s": _FASTER * FLOPS_PER_S} | (device or {})
    return box(*["cpu"] * len(kinds), hosts=kinds, links=joined, host=_ROOM, device=device)


def needed(machine: Machine, fixed_s: float = 0.0) -> SecondMachine:
    found = second_machine(workload(fixed_s), machine, BATCH)
    assert found is not None
    return found


def next_of_grid(nbytes_per_s: float) -> float | None:
    larger = BANDWIDTHS[bisect_right(BANDWIDTHS, 8 * nbytes_per_s) :]
    return larger[0] if larger else None


# Bytes sent per step: all gradients; a quarter of them; all of them every 100 steps.
@pytest.mark.parametrize(
    ("exchange", "nbytes"), [("plain", NBYTES), ("codec", NBYTES / 4), ("local", NBYTES / 100)]
)
def test_a_link_pays_if_the_exchange_takes_less_than_a_second_machine_saves(exchange, nbytes):
    found = needed(hosts(GIGABYTE, EIGHT_BITS))
    (own,) = [one for one in found.requirements if one.exchange == exchange]
    saved_s = [COMPUTE_S - COMPUTE_S / (1 + speed) for speed in SPEEDS]
    assert own.bits_per_s == tuple(next_of_grid(nbytes / one) for one in saved_s)
    assert found.alone_samples_per_s == pytest.approx(BATCH / COMPUTE_S)
    assert own.is_learning_known is (exchange != "local")  # not for 100,000,000 parameters


@pytest.mark.parametrize(
    ("nbytes_per_s", "speed"),
    [
        (1.6 * GIGABYTE, 0.34),  # an exchange of 0.25 s: s = 1 / 3
        (8 * GIGABYTE, 0.06),  # 0.05 s: s = 1 / 19
        (0.81 * GIGABYTE, 0.98),  # 0.494 s: s = 0.976
        (0.7 * GIGABYTE, None),  # 0.571 s, but an equal second machine saves only 0.5 s
    ],
)
def test_a_second_machine_pays_if_it_saves_the_time_of_the_exchange(nbytes_per_s, speed):
    (plain, _) = needed(hosts(nbytes_per_s)).requirements
    assert (plain.exchange, plain.speed) == ("plain", speed)


@pytest.mark.parametrize("fixed_s", [0.02, 0.3])
def test_time_independent_of_samples_is_longer_on_the_slower_machine(fixed_s):
    def step_s(samples: int, speed: float) -> float:
        first, second = samples / BATCH, 1 - samples / BATCH
        return max(fixed_s + COMPUTE_S * first, (fixed_s + COMPUTE_S * second) / speed)

    expected = []
    for speed in SPEEDS:
        best_s = min(step_s(samples, speed) for samples in range(1, BATCH))
        saved_s = fixed_s + COMPUTE_S - best_s
        expected.append(next_of_grid(NBYTES / saved_s) if saved_s > 0 else None)
    assert needed(hosts(GIGABYTE), fixed_s).requirements[0].bits_per_s == tuple(expected)
    assert (expected[-1] is None) is (fixed_s > 1 / 8)  # which takes the slowest machine too long


def test_a_slower_machine_encodes_more_slowly():
    # Encoding takes 0.1 / s, and the exchange 0.01 s; the machine saves s / (1 + s).
    slow = {"codecs": {"eightbit": codec_speed(NBYTES / 4 / 0.1, 1e18)}}
    for device, speed in ((EIGHT_BITS, 0.02), (slow, 0.38)):
        found = needed(hosts(10 * GIGABYTE, device)).requirements
        assert [one.speed for one in found if one.exchange == "codec"] == [speed]


@pytest.mark.parametrize(
    ("kinds", "memory_bytes", "batch_size"),
    [("aa", 1e12, BATCH), ("ab", 1e9, BATCH), ("ab", 1e12, 1), ("a" * 16 + "b", 1e12, BATCH)],
)
def test_unsuitable_machines_and_batches_give_no_answer(kinds, memory_bytes, batch_size):
    machine = hosts(GIGABYTE, {"memory_bytes": memory_bytes}, kinds)
    assert second_machine(workload(), machine, batch_size) is None
