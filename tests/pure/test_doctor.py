import pytest

from paceline.studies.doctor.examination import Examination, Gpu, Network, page, slow_parts

WELL = Examination(
    versions={"paceline": "1.0", "torch": "2.10"},
    built={"Paceline": "GCC 12"},
    processor="AMD EPYC",
    cores=8,
    physical_cores=4,
    all_cores=8,
    quota=None,
    load=0.5,
    instruction_sets=("fpu", "avx2", "avx512f"),
    used_instruction_sets=("avx2", "fma", "avx512f"),
    torch_capability="AVX512",
    threads=4,
    asked_threads=None,
    memory_nbytes=32 << 30,
    free_nbytes=30 << 30,
    governor="performance",
    networks=(Network(name="eth0", bit_per_s=10e9, mtu=1500),),
    gpus=(),
    unusable_gpus=None,
    pinned=None,
)
GPUS = tuple(Gpu(name="P100", memory_nbytes=16 << 30, reaches=(1 - i,)) for i in range(2))


def test_nothing_is_slow_on_a_machine_that_is_well():
    assert slow_parts(WELL) == ()
    assert slow_parts(WELL.model_copy(update={"gpus": GPUS, "pinned": True})) == ()
    assert "Nothing was found that would be slow." in page(WELL)


@pytest.mark.parametrize(
    ("found", "what"),
    [
        ({"load": 2.1}, "the machine is busy: 2.1 processes"),
        ({"quota": 2.0}, "8 cores are to be seen, but only 2 may be used"),
        ({"threads": 1, "asked_threads": "1"}, "OMP_NUM_THREADS=1 of 4 cores"),
        ({"governor": "powersave"}, "frequency governor is powersave"),
        ({"used_instruction_sets": ("avx2",)}, "kernels use none of avx512f, which"),
        ({"used_instruction_sets": ()}, "kernels use none of avx2, avx512f, which"),
        (
            {"instruction_sets": (), "used_instruction_sets": (), "processor": "aarch64"},
            "no vector kernels for this processor (aarch64)",
        ),
        ({"unusable_gpus": "the driver is too old"}, "there is a GPU that cannot be used"),
        (
            {"gpus": tuple(one.model_copy(update={"reaches": ()}) for one in GPUS)},
            "GPUs do not reach each other's memory: 0-1",
        ),
        ({"gpus": GPUS, "pinned": False}, "host memory cannot be pinned"),
        ({"free_nbytes": 1 << 29}, "0.5 GiB of host memory are free"),
        ({"networks": (Network(name="eth0", bit_per_s=1e9, mtu=1500),)}, "eth0 has 1 Gbit/s"),
    ],
)
def test_what_is_slow_is_said_with_its_reason_and_what_would_help(found, what):
    (slow,) = slow_parts(WELL.model_copy(update=found))
    assert what in slow.what
    assert f"**{slow.what}**: {slow.why}. Instead: {slow.instead}." in page(
        WELL.model_copy(update=found)
    )


def test_an_exchange_over_a_slow_network_takes_as_long_as_its_bits():
    slow = WELL.model_copy(update={"networks": (Network(name="e", bit_per_s=1e9, mtu=1500),)})
    assert "at least 3.2 s a step" in slow_parts(slow)[0].why  # 1e8 x 32 bits / 1e9 bit/s


def test_the_page_is_a_table_that_an_issue_shows():
    lines = page(WELL).splitlines()
    assert lines[0] == "## paceline doctor"
    rows = [line for line in lines if line.startswith("| ")]
    assert all(line.count("|") == 3 for line in rows)
    assert "| versions | paceline 1.0, torch 2.10 |" in rows
