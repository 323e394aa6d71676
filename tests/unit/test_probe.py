"""What `paceline probe` refuses, and what it makes of figures; no worker is started."""

import pytest
import torch

from groups import group_of
from paceline.core.machine import Device, Host, Machine
from paceline.devices.host import HostDevice
from paceline.links.group import Group
from paceline.measure.devices import CodecFigures, DeviceFigures
from paceline.measure.this_machine import facts
from paceline.measure.timing import Sampler, Spread
from paceline.record.clock import HostClock
from paceline.studies.probe.link_speeds import Links
from paceline.studies.probe.machine_description import (
    RankFigures,
    machine_of,
    name_from,
    spread_text,
    unrest_of,
)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", "0"], "workers: Input should be greater than or equal to 1, not 0"),
        (["--workers", "-2"], "workers: Input should be greater than or equal to 1, not -2"),
        (["--workers", "some"], "--workers"),
        (["--workers", "9999"], "workers: 9999 do not fit on "),
        (["--seconds", "0"], "seconds: Input should be greater than 0, not 0.0"),
        (["--seconds", "nan"], "seconds: Input should be "),
        (["--seconds", "inf"], "seconds: Input should be "),
        (["--output", "mine.toml"], "output: mine.toml is there already; name another file, or "),
        (["--output", "."], "output: . is a folder; name a file, such as this.toml"),
        (["--output", "none/mine.toml"], "output: there is no folder none; make it first"),
        (["--output", "none/mine.toml", "--force"], "output: there is no folder none"),
        (["alexnet"], "unexpected extra argument"),
    ],
)
def test_what_cannot_be_measured_is_one_line_and_exit_code_2(line, tmp_path, arguments, message):
    (tmp_path / "mine.toml").write_text("precious")
    line("probe", *arguments)
    assert line.code == 2, line.err
    assert line.out == ""
    assert line.err.startswith("paceline: ")
    assert line.err.count("\n") == 1
    assert message in line.err
    assert (tmp_path / "mine.toml").read_text() == "precious"
    assert [path.name for path in tmp_path.iterdir()] == ["mine.toml"]


def test_torchrun_says_how_many_workers_there_are(line, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    line("probe", "--workers", "2")
    assert (line.code, line.err) == (2, "paceline: workers: 2 asked for, 3 started\n")


def test_a_spread_is_the_median_and_the_quartiles():
    spread = Spread.of([5.0, 1.0, 4.0, 2.0, 3.0])
    assert (spread.median, spread.lower, spread.upper, spread.count) == (3, 2, 4, 5)
    rate = Spread.rate(12.0, [1.0, 2.0, 3.0])
    assert (rate.median, rate.lower, rate.upper) == (6, 5, 9)
    assert spread_text(Spread.of([2e-6, 2e-6]), "s") == "2 us (2 us to 2 us, quartiles of 2)"


class Told(HostClock):
    """A clock whose time goes on by what each run is said to take."""

    def __init__(self) -> None:
        self.now = 0.0

    def mark(self) -> float:
        return self.now

    def seconds(self, marks):
        return list(marks)


@pytest.mark.parametrize(("takes_s", "num_runs"), [(0.5, 3), (0.25, 4), (1e-9, 400), (0.0, 400)])
def test_as_many_runs_as_fit_into_the_time_but_three(takes_s: float, num_runs: int):
    clock = Told()

    def run() -> None:
        clock.now += takes_s

    seconds = Sampler(group_of(), clock, 1.0).seconds(run)
    assert len(seconds) == num_runs
    assert seconds == pytest.approx([takes_s] * num_runs, abs=1e-12)


@pytest.mark.parametrize(
    ("text", "name"),
    [("my laptop", "my-laptop"), ("node-7.lab", "node-7.lab"), ("...", "this-machine")],
)
def test_names_are_those_that_files_allow(text: str, name: str):
    assert name_from(text) == name


def spread(value: float) -> Spread:
    return Spread(median=value, lower=value / 2, upper=2 * value, count=7)


def figures(hostname: str, speed: float) -> RankFigures:
    codec = CodecFigures(encode=spread(speed), decode=spread(3 * speed))
    return RankFigures(
        hostname=hostname,
        cores=4,
        device_memory_bytes=10**9,
        has_own_memory=False,
        facts=facts(torch.device("cpu")),
        device=DeviceFigures(
            convolution=spread(3 * speed),
            linear=spread(speed),
            traffic=spread(0.5 * speed),
            call_s=spread(2e-6),
            codecs={"eightbit": codec},
        ),
        copies=spread(10 * speed),
        sum_s=spread(1e3 / speed),
        codec_latencies={"eightbit": 1e-4},
    )


def test_equal_cores_that_differ_are_as_much_unrest_as_measurements_that_do():
    def steady(value: float) -> RankFigures:
        alike = Spread(median=value, lower=value, upper=value, count=7)
        usual = figures("box", value)
        device = usual.device.model_copy(update={"convolution": alike, "linear": alike})
        return usual.model_copy(update={"device": device})

    assert unrest_of([steady(1e9), steady(1e9)]) == 0.0
    assert unrest_of([steady(18.7e9), steady(12.9e9)]) == pytest.approx(5.8 / (2 * 15.8))
    assert unrest_of([figures("box", 1e9)]) == pytest.approx(0.75)  # quartiles: half and double


def machine_on(hostnames: list[str], hosts: list[list[int]]) -> Machine:
    ranks = [figures(hostname, (i + 1) * 1e9) for i, hostname in enumerate(hostnames)]
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
    assert "1 GB/s (500 MB/s to 2 GB/s, quartiles of 7)" in second.source


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


class Bus(Told):
    """A clock on which a copy takes 10 us, and a second for each 8 GB."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
        self.now += 1e-5 + target.nbytes / 8e9


class Alike(Group):
    """A group all of whose ranks have the same to say as this one."""

    def gather(self, value):
        return [value] * self.world_size


GPUS = Machine(
    name="some",
    hosts=(
        Host(name="a", cores=1, memory_bytes=1, memory_bandwidth_bytes_per_s=1, source="-"),
        Host(name="b", cores=1, memory_bytes=1, memory_bandwidth_bytes_per_s=1, source="-"),
    ),
    devices=tuple(
        Device(
            name=f"gpu{i}",
            host="aab"[i],
            kind="gpu",
            flops_per_s=1,
            memory_bytes=1,
            memory_bandwidth_bytes_per_s=1,
            source="-",
        )
        for i in range(3)
    ),
)


@pytest.fixture
def links(monkeypatch) -> Links:
    """The links of three GPUs, which are none: what is to be there is in this computer's memory."""
    bus = Bus()
    for name in ("empty", "zeros"):
        here = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda n, dtype, here=here, **where: here(n, dtype=dtype))
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *args, **how: bus.copy(*args, **how))
    group = group_of(0, 3, kind=Alike)
    sampler = Sampler(group, bus, 1e-9)
    return Links(GPUS, [(0, 1), (2,)], sampler, sampler, "measured somehow")


def test_every_gpu_has_a_link_to_its_host(links):
    found = list(links._to_hosts())
    assert [link.between for link in found] == [("gpu0", "a"), ("gpu1", "a"), ("gpu2", "b")]
    for link in found:
        assert link.bandwidth_bytes_per_s == pytest.approx(8e9, rel=0.01)
        assert link.latency_s == pytest.approx(1e-5, rel=0.01)
        assert link.source.startswith("measured somehow; cpu, copies of 64 MiB to pinned")


def test_gpus_that_reach_each_other_within_a_host_have_a_link(links, monkeypatch):
    (link,) = links._between_peers()
    assert link.between == ("gpu0", "gpu1")
    assert link.bandwidth_bytes_per_s == pytest.approx(8e9, rel=0.01)
    assert link.latency_s == pytest.approx(1e-5, rel=0.01)
    monkeypatch.setattr(HostDevice, "reaches", lambda *devices: False)
    assert list(links._between_peers()) == []
