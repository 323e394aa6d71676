"""Descriptions of this machine by probes and profiles: facts, figures, and turns of workers."""

import json
import os
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import pytest
import torch

from absent_ranks import group_of
from boxes import box
from paceline.core.cost import Rate, Roofline, compute_lane
from paceline.core.machine import Machine
from paceline.core.workload import Cost, Layer, Workload
from paceline.exchange.replica import Probe
from paceline.exchange.replicas import prober
from paceline.links.devices import Device
from paceline.links.group import Group
from paceline.measure.devices import CodecFigures, DeviceFigures
from paceline.measure.this_machine import facts, speed_of, this_machine
from paceline.measure.timing import Sampler, Spread
from paceline.rpc.frames import Message
from paceline.strategies import EXCHANGES
from paceline.strategies.wheel.worker_group import ProbeTurns
from paceline.studies.probe.link_speeds import Links
from paceline.studies.probe.machine_description import (
    RankFigures,
    machine_of,
    name_from,
    spread_text,
    unrest_of,
)
from refusals import refused, refused_field
from ticking import Ticking


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["--workers", "9999"], "workers"),
        (["--workers", "2"], "workers"),  # torchrun has started 3
        (["--output", "mine.toml"], "output"),
        (["--output", "."], "output"),
        (["--output", "none/mine.toml", "--force"], "output"),
    ],
)
def test_a_refused_probe_writes_nothing(line, tmp_path, monkeypatch, arguments, field):
    if arguments == ["--workers", "2"]:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "3")
    (tmp_path / "mine.toml").write_text("precious")
    line("probe", *arguments)
    assert (line.code, line.out, refused_field(line.err)) == (2, "", field)
    assert (tmp_path / "mine.toml").read_text() == "precious"
    assert [path.name for path in tmp_path.iterdir()] == ["mine.toml"]


def test_a_spread_is_the_median_and_the_quartiles():
    found = Spread.of([5.0, 1.0, 4.0, 2.0, 3.0])
    assert (found.median, found.lower, found.upper, found.count) == (3, 2, 4, 5)
    rate = Spread.rate(12.0, [1.0, 2.0, 3.0])
    assert (rate.median, rate.lower, rate.upper) == (6, 5, 9)
    assert spread_text(Spread.of([2e-6, 2e-6]), "s").startswith("2 us (2 us to 2 us")


def test_names_are_made_valid_for_machine_files():
    given = ("my laptop", "node-7.lab", "...")
    assert [name_from(text) for text in given] == ["my-laptop", "node-7.lab", "this-machine"]


@pytest.mark.parametrize(("takes_s", "num_runs"), [(0.5, 3), (0.25, 4), (1e-9, 400), (0.0, 400)])
def test_runs_fill_the_time_but_are_3_to_400(takes_s: float, num_runs: int):
    clock = Ticking()

    def run() -> None:
        clock.now += takes_s

    seconds = Sampler(group_of(), clock, 1.0).seconds(run)
    assert seconds == pytest.approx([takes_s] * num_runs, abs=1e-12)


def spread(value: float) -> Spread:
    return Spread(median=value, lower=value / 2, upper=2 * value, count=7)


def figures(speed: float, hostname: str = "box", linear: Spread | None = None) -> RankFigures:
    fast, usual = spread(3 * speed), spread(speed)
    return RankFigures(
        hostname=hostname,
        cores=4,
        device_memory_bytes=10**9,
        has_own_memory=False,
        facts=facts(torch.device("cpu")),
        device=DeviceFigures(
            convolution=linear or fast,
            linear=linear or usual,
            traffic=spread(0.5 * speed),
            call_s=spread(2e-6),
            codecs={"eightbit": CodecFigures(encode=usual, decode=fast)},
        ),
        copies=spread(10 * speed),
        sum_s=spread(1e3 / speed),
        codec_latencies={"eightbit": 1e-4},
    )


def test_differences_between_equal_cores_and_between_measurements_are_unrest():
    def steady(value: float) -> RankFigures:
        return figures(value, linear=Spread(median=value, lower=value, upper=value, count=7))

    assert unrest_of([steady(1e9), steady(1e9)]) == 0.0
    assert unrest_of([steady(18.7e9), steady(12.9e9)]) == pytest.approx(5.8 / (2 * 15.8))
    assert unrest_of([figures(1e9)]) == pytest.approx(0.75)  # quartiles: half and double


def machine_on(hostnames: list[str], hosts: list[list[int]]) -> Machine:
    ranks = [figures((i + 1) * 1e9, hostname) for i, hostname in enumerate(hostnames)]
    return machine_of("some", ranks, hosts, "cpu", "measured somehow")


def test_the_ranks_of_a_host_share_its_memory_and_wait_for_the_slowest():
    machine = machine_on(["box.lab"] * 2, [[0, 1]])
    (host,) = machine.hosts
    assert (host.name, host.cores) == ("box", 4)
    assert host.memory_bandwidth_bytes_per_s == 30e9
    assert host.reduce_latency_s == pytest.approx(1e-6, rel=1e-12)
    first, second = machine.devices
    assert (first.name, second.name, second.host) == ("cpu0", "cpu1", "box")
    assert (first.flops_per_s, second.flops_per_s) == (1.5e9, 3e9)  # half of the work at each rate
    assert second.memory_bandwidth_bytes_per_s == 1e9
    assert second.codecs["eightbit"].model_dump() == {
        "encode_values_per_s": 2e9,
        "decode_values_per_s": 6e9,
        "latency_s": pytest.approx(1e-4, rel=1e-12),
    }
    assert "1 GB/s (500 MB/s to 2 GB/s" in second.source


@pytest.mark.parametrize(
    ("hostnames", "names"),
    [
        (["a", "b.lab"], ["a", "b"]),
        (["same", "same"], ["host0", "host1"]),
        (["cpu0", "b"], ["host0", "host1"]),
    ],
)
def test_hosts_have_their_own_names_where_those_are_clear(hostnames, names):
    machine = machine_on(hostnames, [[0], [1]])
    assert [host.name for host in machine.hosts] == names
    assert [device.host for device in machine.devices] == names


class Alike(Group):
    """A group in which all ranks send the values of this one."""

    def gather(self, value):
        return [value] * self.world_size


@pytest.fixture
def links(monkeypatch) -> Links:
    """The links of three simulated GPUs, with copies of 10 us and 8 GB/s."""
    bus, machine = Ticking(), box("gpu", "gpu", "gpu", hosts="aab")

    def copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
        bus.now += 1e-5 + target.nbytes / 8e9

    for name in ("empty", "zeros"):
        here = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda n, dtype, here=here, **where: here(n, dtype=dtype))
    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    sampler = Sampler(group_of(0, 3, kind=Alike), bus, 1e-9)
    return Links(machine, [(0, 1), (2,)], sampler, sampler, "measured somehow")


def test_gpus_have_links_to_their_host_and_to_gpus_that_they_reach(links, monkeypatch):
    to_hosts, between = list(links._to_hosts()), list(links._between_peers())
    assert [link.between for link in to_hosts] == [("gpu0", "a"), ("gpu1", "a"), ("gpu2", "b")]
    assert [link.between for link in between] == [("gpu0", "gpu1")]
    for link in (*to_hosts, *between):
        assert link.bandwidth_bytes_per_s == pytest.approx(8e9, rel=0.01)
        assert link.latency_s == pytest.approx(1e-5, rel=0.01)
        assert link.source.startswith("measured somehow")
    monkeypatch.setattr(Device, "reaches", lambda *devices: False)
    assert list(links._between_peers()) == []


def test_a_probe_waits_for_ranks_that_end_later():
    """Otherwise the root of a tree would measure half of the others' time."""
    seen: list[str] = []

    def replicate(module):
        def exchange(scalar):
            seen.append("exchanged")
            return module(scalar)

        exchange.close = lambda: seen.append("closed")
        return exchange

    sizes, cpu = [[8], [16]], torch.device("cpu")
    probe = Probe(sizes, cpu, replicate, barrier=lambda: seen.append("all have it"))
    probe()
    probe()
    probe.close()
    assert seen == ["exchanged", "all have it"] * 2 + ["closed"]
    waits = {
        name: prober(one, one.config(workers=2), Group.alone(cpu, 1.0)).make.keywords["barrier"]
        for name, one in EXCHANGES.items()
    }
    assert [name for name, barrier in waits.items() if barrier is not None] == ["tree"]


def asks(turns: ProbeTurns, worker: int, nbytes: int = 100) -> bool:
    """Request a probe; return whether it is the worker's turn."""
    reply = turns.reply(worker, Message("probe", nbytes))
    assert reply is None or reply.parts[0].nbytes == nbytes
    return reply is not None


def test_workers_probe_in_turns():
    turns = ProbeTurns(1000, 5.0)
    assert [asks(turns, worker) for worker in (0, 1, 2)] == [True, False, False]
    turns.end(1)  # it is not its turn
    assert not asks(turns, 1)
    assert asks(turns, 0, 64)
    turns.end(0)
    assert [asks(turns, worker) for worker in (1, 2)] == [True, False]
    turns.end(1)  # a lost worker gives up its turn
    assert asks(turns, 2)


def test_probes_are_of_a_bounded_size_and_number():
    turns = ProbeTurns(1000, 5.0)
    for nbytes in (-1, 1001, 2**62):
        with refused("probe"):
            asks(turns, 0, nbytes)
    for _ in range(200):
        assert asks(turns, 0, 1000)
    with refused("probe"):
        asks(turns, 0)
    turns.end(0)  # its profile has arrived
    with refused("probe"):
        asks(turns, 0)
    turns.forget(0)
    assert asks(turns, 0)


def test_a_worker_that_does_not_use_its_turn_loses_it():
    clock = Ticking()
    turns = ProbeTurns(1000, 5.0, clock.mark)
    assert asks(turns, 3)
    for clock.now, is_late in ((4.9, False), (5.1, True)):
        assert asks(turns, 4) == is_late
    assert not asks(turns, 3)


MEMINFO = Path("/proc/meminfo")  # its first line: MemTotal: ... kB


def ranks(number: int, kind: str, boot_ids: str = "a") -> Group:
    return group_of(0, number, "cuda:0" if kind == "gpu" else "cpu", boot_ids)


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_every_rank_is_a_device_of_its_own_speed(kind: str):
    machine = this_machine(ranks(2, kind), [Rate(3e9, 5e9), Rate(2e9, 4e9)])
    facts_of = attrgetter("name", "kind", "flops_per_s", "memory_bandwidth_bytes_per_s")
    expected = [(f"{kind}0", kind, 3e9, 5e9), (f"{kind}1", kind, 2e9, 4e9)]
    assert list(map(facts_of, machine.devices)) == expected
    assert Machine.model_validate(machine.model_dump()) == machine


def test_the_layers_of_a_profiled_model_take_the_measured_time():
    # One layer is limited by arithmetic, one by memory: at average rates, they would take 3 s.
    conv = Layer("conv", (), 0, Cost(4e9, 1e6), Cost(8e9, 2e6))
    fc = Layer("fc", (), 0, Cost(1e6, 2e9), Cost(2e6, 6e9))
    workload = Workload("two", 1, (conv, fc), (1, 0), 0)
    machine = this_machine(ranks(1, "cpu"), [speed_of(workload, 1.5)])
    rate = Roofline.of(machine).rates[compute_lane("cpu0")]
    parts = [conv.forward, conv.backward, fc.forward, fc.backward]
    assert sum(map(rate.work_s, parts)) == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("boot_ids", "hosts"),
    [
        ("aaaa", ["this-host"] * 4),
        ("abac", ["host0", "host1", "host0", "host2"]),
    ],
)
def test_ranks_of_one_kernel_are_on_one_host(boot_ids: str, hosts: list[str]):
    machine = this_machine(ranks(4, "cpu", boot_ids), [Rate(1e9, 1e9)] * 4)
    assert [device.host for device in machine.devices] == hosts
    assert [host.name for host in machine.hosts] == sorted(set(hosts))


def test_ranks_in_different_containers_share_no_host():
    group = ranks(2, "cpu")
    one, other = group.members
    apart = replace(group, members=(one, other._replace(pid_namespace="other")))
    machine = this_machine(apart, [Rate(1e9, 1e9)] * 2)
    assert [device.host for device in machine.devices] == ["host0", "host1"]


def test_facts_are_those_of_the_system():
    known = facts(torch.device("cpu"))
    assert json.loads(json.dumps(known)) == known
    expected = {"cores": len(os.sched_getaffinity(0)), "device": "cpu", "torch": torch.__version__}
    expected["memory_bytes"] = int(MEMINFO.read_text().split()[1]) * 1024
    assert known.items() >= expected.items()
    assert known["processor"]
