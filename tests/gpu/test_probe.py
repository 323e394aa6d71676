"""A probe of GPUs: what they compute, and their ways to the host and to each other."""

import pytest
import torch

from paceline.records.machine_file import read_machine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


def test_gpus_are_measured_with_their_links(paceline, tmp_path):
    done = paceline("probe", "--seconds", "1", "--output", "gpus.toml")
    assert done.code == 0, done.err
    machine = read_machine(tmp_path / "gpus.toml")
    (host,) = machine.hosts
    assert len(machine.devices) == torch.cuda.device_count()
    assert set(host.codecs) == {"eightbit", "cast", "onebit"}
    for index, device in enumerate(machine.devices):
        assert (device.name, device.kind) == (f"gpu{index}", "gpu")
        assert device.memory_bytes == torch.cuda.get_device_properties(index).total_memory
        assert 1e11 < device.flops_per_s < 1e16
        assert 1e10 < device.memory_bandwidth_bytes_per_s < 2e13
        (hop,) = machine.route(device, host)
        assert 1e8 < hop.link.bandwidth_bytes_per_s < 1e12
        assert 0 <= hop.link.latency_s < 1e-2
