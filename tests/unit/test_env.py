"""`paceline env`: causes of slow training have a code and figures."""

import os

import psutil
import pytest
import torch
from torch.utils import collect_env

from paceline.studies.env import Machine, slow_parts

WELL = Machine(
    cores=8,
    quota=None,
    load=2.0,
    torch_capability="AVX512",
    kernels=("portable", "avx2", "avx512"),
    free_nbytes=30 << 30,
    memory_nbytes=32 << 30,
    apart=(),
    unusable_gpus=None,
    networks={"eth0": 2.5e9},
)


@pytest.mark.parametrize(
    ("found", "code", "figures"),
    [
        ({"load": 2.1}, "busy", ["2.1", "8"]),
        ({"quota": 2.0}, "quota", ["8", "2"]),
        ({"kernels": ("portable", "avx2")}, "kernels", ["AVX512"]),
        ({"torch_capability": "AVX2", "kernels": ("portable",)}, "kernels", ["AVX2"]),
        ({"unusable_gpus": "the driver is too old"}, "gpu", ["too old"]),
        ({"apart": ((0, 1),)}, "peer_memory", ["0-1"]),
        # 1e8 values of 32 bits over 1e9 bit/s.
        ({"networks": {"eth0": 1e9}}, "network", ["eth0", "1 Gbit/s", " 3.2 s "]),
        # Values exactly at a limit are not slow.
        ({}, None, []),
        ({"quota": 8.0}, None, []),
        ({"torch_capability": "DEFAULT", "kernels": ("portable",)}, None, []),
    ],
)
def test_each_cause_of_slowness_has_a_code_and_figures(found, code, figures):
    slow = list(slow_parts(WELL.model_copy(update=found)))
    assert [one.code for one in slow] == ([code] if code else [])
    for one in slow:
        assert all(figure in one.what + one.why for figure in figures)


def test_the_page_and_its_json_describe_this_machine(line, monkeypatch):
    # collect_env takes seconds, and torch tests it.
    asked = collect_env.SystemEnv(*[None] * len(collect_env.SystemEnv._fields))
    asked = asked._replace(torch_version=torch.__version__, is_cuda_available="False")
    monkeypatch.setattr(collect_env, "get_env_info", lambda: asked)
    found = line("env", "--json").found
    assert found["torch"]["torch_version"] == torch.__version__
    machine = found["machine"]
    assert machine["cores"] == len(os.sched_getaffinity(0))
    assert 0 < machine["free_nbytes"] < machine["memory_nbytes"] == psutil.virtual_memory().total
    assert "lo" not in machine["networks"]
    page = line("env").out
    assert f"PyTorch version: {torch.__version__}" in page
    assert all(one["what"] in page for one in found["slow"] if one["code"] != "busy")
