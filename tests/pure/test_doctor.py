import pytest

from paceline.studies.doctor.examination import Examination, Gpu, Network, page, slow_parts


def network(bit_per_s: float | None) -> tuple[Network]:
    return (Network(name="eth0", bit_per_s=bit_per_s, mtu=1500),)


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
    networks=network(10e9),
    gpus=(),
    unusable_gpus=None,
    pinned=None,
)
GPUS = tuple(Gpu(name="P100", memory_nbytes=16 << 30, reaches=(1 - i,)) for i in range(2))
APART = tuple(one.model_copy(update={"reaches": ()}) for one in GPUS)
UNKNOWN = {"instruction_sets": (), "used_instruction_sets": ()}


@pytest.mark.parametrize(
    ("found", "code", "figures"),
    [
        ({"load": 2.1}, "busy", ["2.1"]),
        ({"quota": 2.0}, "quota", ["8", "2"]),
        ({"threads": 1, "asked_threads": "1"}, "threads", ["1", "4"]),
        ({"governor": "powersave"}, "governor", []),
        ({"used_instruction_sets": ("avx2",)}, "kernels", ["avx512f"]),
        ({"used_instruction_sets": ()}, "kernels", ["avx2", "avx512f"]),
        (UNKNOWN | {"processor": "aarch64"}, "no_kernels", ["aarch64"]),
        ({"unusable_gpus": "the driver is too old"}, "gpu", []),
        ({"gpus": APART}, "peer_memory", ["0-1"]),
        ({"gpus": GPUS, "pinned": False}, "pinned", []),
        ({"free_nbytes": 1 << 29}, "memory", ["0.5 GiB"]),
        # 1e8 values of 32 bits over 1e9 bit/s.
        ({"networks": network(1e9)}, "network", ["eth0", "1", " 3.2 s "]),
        # What is just within its bounds is not slow.
        ({}, None, []),
        ({"load": 2.0}, None, []),
        ({"quota": 8.0}, None, []),
        ({"threads": 4, "asked_threads": "4"}, None, []),
        ({"free_nbytes": 1 << 30}, None, []),
        ({"networks": network(2.5e9)}, None, []),
        ({"networks": network(None)}, None, []),
        (UNKNOWN | {"gpus": GPUS, "pinned": True}, None, []),
    ],
)
def test_what_is_slow_has_a_code_and_its_figures(found, code, figures):
    examined = WELL.model_copy(update=found)
    slow = slow_parts(examined)
    assert [one.code for one in slow] == ([code] if code else [])
    for one in slow:
        assert all(figure in one.what + one.why for figure in figures)
        assert all(part in page(examined) for part in one[1:])
