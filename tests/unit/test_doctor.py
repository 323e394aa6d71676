import os
import platform

import torch

from paceline.studies.doctor.this_machine import examine


def test_the_machine_is_described_as_the_system_describes_it():
    found = examine()
    assert found.versions["torch"] == torch.__version__.partition("+")[0] or torch.__version__
    assert found.versions[platform.system()] == platform.release()
    assert found.cores == len(os.sched_getaffinity(0))
    assert 0 < found.physical_cores <= found.cores <= found.all_cores
    assert 0 < found.free_nbytes < found.memory_nbytes
    assert found.threads == torch.get_num_threads()
    assert "lo" not in [one.name for one in found.networks]
    assert found.built["Paceline"].startswith(("GCC", "clang"))


def test_the_page_and_its_json_say_the_same(line):
    line("doctor")
    assert line.code == 0
    assert line.out.startswith("## paceline doctor\n")
    found = line("doctor", "--json").found
    assert found["versions"]["torch"] == torch.__version__
    assert {"code", "what", "why", "instead"} == set().union(*found["slow"]) or not found["slow"]
