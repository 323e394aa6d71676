"""Rings at once over direct links, against the hardware's degrees and a search by brute force."""

from collections import Counter
from itertools import combinations, pairwise, permutations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from boxes import box, link
from paceline.core.calibration import Measurement, line_through
from paceline.core.ring_search import rings_at_once
from paceline.core.transfer import Ring, lanes_of
from paceline.records.catalogue import by_name
from paceline.records.machine_file import read_machine
from paceline.strategies.allreduce.plan import calibrate

GBPS = 1e9


def meshed(num_gpus: int, widths: dict[tuple[int, int], int]):
    """Return so many GPUs, of which pairs have so many links of 1 GB/s."""
    links = [link(f"gpu{a}", f"gpu{b}", count * GBPS) for (a, b), count in widths.items()]
    links += [link(f"gpu{i}", "a", GBPS / 10) for i in range(num_gpus)]
    return box(*["gpu"] * num_gpus, hosts="a" * num_gpus, links=links)


def steps(order) -> list[tuple[str, str]]:
    names = [station.name for station in order]
    return list(pairwise([*names, names[0]]))


@pytest.mark.parametrize(("gpus", "rings"), [(3, 2), (4, 4), (8, 6)])
def test_a_dgx1_has_six_rings_and_its_halves_four(gpus: int, rings: int) -> None:
    machine = read_machine(Path("machines/dgx1-v100.toml"))
    devices = machine.devices[:gpus]
    found = rings_at_once(machine, devices)
    assert len(found) == rings
    # Each way of each link is taken at most as often as there are NVLinks of 25 GB/s.
    used = Counter(step for order in found for step in steps(order))
    for (source, target), times in used.items():
        (one,) = (one for one in machine.links if set(one.between) == {source, target})
        assert times <= one.bandwidth_bytes_per_s / 25e9
    assert all(sorted(order, key=devices.index) == list(devices) for order in found)


def test_a_dgx1_exchanges_over_all_six_links_as_the_catalogue_has_it() -> None:
    # Six NVLinks of 25 GB/s: the same number that the catalogue takes from NVIDIA for eight V100.
    machine = read_machine(Path("machines/dgx1-v100.toml"))
    equal = by_name("8xv100")
    assert equal is not None
    nbytes = 10e9
    explicit, catalogued = (Ring.at_once(one, one.devices, ()) for one in (machine, equal))
    assert explicit.seconds(nbytes) == pytest.approx(2 * 7 / 8 * nbytes / 150e9, rel=0.01)
    assert catalogued.seconds(nbytes) == pytest.approx(explicit.seconds(nbytes), rel=0.01)
    # The task in a plan takes as long: its bytes at the pace of the route that it holds.
    task = explicit.reduction(nbytes)
    (route,) = {route for route in explicit.routes if lanes_of(route) == task.on[: len(route)]}
    pace = route[0].link.bandwidth_bytes_per_s
    assert task.cost.nbytes / pace == pytest.approx(2 * 7 / 8 * nbytes / 150e9, rel=1e-6)


@st.composite
def meshes(draw):
    num_gpus = draw(st.integers(3, 5))
    pairs = list(combinations(range(num_gpus), 2))
    counts = draw(st.lists(st.integers(0, 2), min_size=len(pairs), max_size=len(pairs)))
    return num_gpus, {pair: n for pair, n in zip(pairs, counts, strict=True) if n}


@given(meshes())
def test_no_more_rings_can_be_found_by_trying_all(mesh) -> None:
    num_gpus, counts = mesh
    if not counts:
        return
    narrowest = min(counts.values())
    spare = {frozenset(pair): n // narrowest for pair, n in counts.items()}
    cycles = [
        Counter(map(frozenset, pairwise((0, *order, 0))))
        for order in permutations(range(1, num_gpus))
        if order[0] < order[-1]
    ]

    def most(left: dict[frozenset[int], int], start: int) -> int:
        best = 0
        for number in range(start, len(cycles)):
            after = {pair: n - cycles[number][pair] for pair, n in left.items()}
            known = cycles[number].keys() <= left.keys()
            if known and min(after.values()) >= 0:
                best = max(best, 1 + most(after, number))
        return best

    machine = meshed(num_gpus, counts)
    assert len(rings_at_once(machine, machine.devices)) == 2 * most(spare, 0)


def test_a_measured_ring_takes_as_long_in_the_plan_that_uses_both_directions() -> None:
    machine = meshed(4, {})
    whole = Measurement(1_000, 1e-3), Measurement(10_000_000, 20e-3)
    line = line_through(whole)
    known = calibrate(machine, whole)
    for nbytes, seconds in whole:
        ring = Ring.at_once(known, known.devices, ())
        assert ring.seconds(nbytes) == pytest.approx(seconds, rel=1e-9)
    # One ring alone, over the same links, would take twice as long for each byte.
    one = Ring.over(known, known.devices, ()).seconds(10_000_000)
    assert one == pytest.approx(line.latency_s + 2 * line.seconds_per_byte * 10_000_000)


def test_gpus_without_direct_links_and_cores_form_one_ring_as_listed() -> None:
    machine = meshed(3, {(0, 1): 1, (1, 2): 1})  # no ring: 0 and 2 meet at the host
    assert rings_at_once(machine, machine.devices) == []
    ring = Ring.at_once(machine, machine.devices, ())
    assert len(ring.routes) == 3
    # Of a node that stands for many, the rings within it are not those of all.
    cluster = by_name("2x8xv100+25gbe")
    assert cluster is not None
    part = cluster.for_workers(16, symmetric=True)
    assert Ring.at_once(part, part.devices, ()).seconds(1e9) > 1e9 / 3e9
    cores = box("cpu", "cpu", "cpu", hosts="abc", links=[])
    assert rings_at_once(cores, cores.devices) == []
