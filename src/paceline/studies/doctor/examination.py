"""What a machine has, as the doctor found it, and what of that would be slow, and why.

Pure functions of plain values: `paceline.studies.doctor.this_machine` finds them.
"""

from collections.abc import Iterator
from typing import NamedTuple

from paceline.core.settings import Record

_BUSY_SHARE = 0.25  # of the cores, at work for others
_USUAL_OF_X86 = ("avx2", "avx512f")
_SLOW_NETWORK_BIT_PER_S = 2.5e9
_EXAMPLE_PARAMETERS = 100e6
_FLOAT32_BITS = 32
_LEAST_FREE_NBYTES = 1 << 30


class Network(Record):
    """An interface of the network; the speed is None where the kernel does not know it."""

    name: str
    bit_per_s: float | None
    mtu: int


class Gpu(Record):
    """A GPU; `reaches` are the numbers of those whose memory it can address itself."""

    name: str
    memory_nbytes: int
    reaches: tuple[int, ...] = ()


class Examination(Record):
    """The findings of one machine.

    `cores` are those that this process may use, `quota` the processors that its control group may
    take; `load` counts runnable processes of the last minute. `pinned` says whether host memory can
    be pinned; None where there is no GPU to pin it for. `unusable_gpus` is the reason why GPUs that
    are there cannot be used.
    """

    versions: dict[str, str]
    built: dict[str, str]
    processor: str
    cores: int
    physical_cores: int
    all_cores: int
    quota: float | None
    load: float
    instruction_sets: tuple[str, ...]
    used_instruction_sets: tuple[str, ...]
    torch_capability: str
    threads: int
    asked_threads: str | None
    memory_nbytes: int
    free_nbytes: int
    governor: str | None
    networks: tuple[Network, ...]
    gpus: tuple[Gpu, ...]
    unusable_gpus: str | None
    pinned: bool | None


class Slow(NamedTuple):
    """Something that makes training slow: what, why, and what would help; `code` names it."""

    code: str
    what: str
    why: str
    instead: str


def slow_parts(found: Examination) -> tuple[Slow, ...]:
    """Return what would make training slow on a machine; nothing of one that is well."""
    return (*_cores(found), *_instructions(found), *_gpus(found), *_memory(found), *_links(found))


def _cores(found: Examination) -> Iterator[Slow]:
    if found.load > _BUSY_SHARE * found.cores:
        yield Slow(
            "busy",
            f"the machine is busy: {found.load:.1f} processes run or wait on {found.cores} cores",
            "workers wait for each other, and the slowest of them decides; measurements are noisy",
            "measure when it is quiet, and leave cores to the other programs by --workers",
        )
    if found.quota is not None and found.quota < found.cores:
        yield Slow(
            "quota",
            f"{found.cores} cores are to be seen, but only {found.quota:g} may be used at a time",
            "the control group (a container's limit) stops all workers once they have used that",
            "raise the container's limit, or take as many workers as it has processors",
        )
    if found.asked_threads is not None and found.threads < found.physical_cores:
        yield Slow(
            "threads",
            f"OMP_NUM_THREADS={found.asked_threads} of {found.physical_cores} cores",
            "a single process computes on that many cores only; several workers share them anyway",
            "unset OMP_NUM_THREADS for runs of one worker",
        )
    if found.governor == "powersave":
        yield Slow(
            "governor",
            "the processor's frequency governor is powersave",
            "cores begin each short computation at a low frequency",
            "cpupower frequency-set -g performance",
        )


def _instructions(found: Examination) -> Iterator[Slow]:
    usual = [one for one in _USUAL_OF_X86 if one in found.instruction_sets]
    missed = [
        one for one in usual if one[:6] not in {two[:6] for two in found.used_instruction_sets}
    ]
    if missed:
        yield Slow(
            "kernels",
            f"Paceline's kernels use none of {', '.join(missed)}, which the processor has",
            "codecs and sums take their portable path",
            "install a wheel that was built for this processor, or build it here",
        )
    elif not usual and not found.gpus:
        yield Slow(
            "no_kernels",
            f"Paceline has no vector kernels for this processor ({found.processor})",
            "codecs and sums take their portable path",
            "plan with what `paceline probe` measures here; a codec pays later than elsewhere",
        )


def _gpus(found: Examination) -> Iterator[Slow]:
    if found.unusable_gpus is not None:
        yield Slow(
            "gpu",
            "there is a GPU that cannot be used",
            found.unusable_gpus,
            "mend that, or hide the GPU with CUDA_VISIBLE_DEVICES= to compute on cores",
        )
    numbers = range(len(found.gpus))
    apart = [
        f"{i}-{j}" for i in numbers for j in numbers if i < j and j not in found.gpus[i].reaches
    ]
    if apart:
        yield Slow(
            "peer_memory",
            f"GPUs do not reach each other's memory: {', '.join(apart)}",
            "what they exchange goes through the host's memory",
            "try --strategy host, which sums there; `paceline plan` says what it gains",
        )
    if found.pinned is False:
        yield Slow(
            "pinned",
            "host memory cannot be pinned",
            "copies to and from GPUs are staged by the driver, and do not run beside computation",
            "raise the limit of locked memory (ulimit -l unlimited; in Docker --ulimit memlock=-1)",
        )


def _memory(found: Examination) -> Iterator[Slow]:
    if found.free_nbytes < _LEAST_FREE_NBYTES:
        yield Slow(
            "memory",
            f"{found.free_nbytes / 2**30:.1f} GiB of host memory are free",
            "each worker takes a few hundred MiB before its first step",
            "end other programs, or take fewer workers",
        )


def _links(found: Examination) -> Iterator[Slow]:
    for one in found.networks:
        if one.bit_per_s is not None and one.bit_per_s < _SLOW_NETWORK_BIT_PER_S:
            seconds = _FLOAT32_BITS * _EXAMPLE_PARAMETERS / one.bit_per_s
            yield Slow(
                "network",
                f"network {one.name} has {one.bit_per_s / 1e9:g} Gbit/s",
                "between two machines, gradients of 100 million parameters take at least "
                f"{seconds:.2g} s a step",
                "--set codec=dynamic8 sends a quarter, --strategy local once in many steps",
            )


def page(found: Examination) -> str:
    """Return the page of Markdown to paste into an issue."""
    rows = "\n".join(f"| {name} | {value} |" for name, value in _rows(found))
    slow = slow_parts(found)
    lines = [f"- **{one.what}**: {one.why}. Instead: {one.instead}." for one in slow]
    told = "\n".join(lines) or "Nothing was found that would be slow."
    return (
        f"## paceline doctor\n\n| what | here |\n|---|---|\n{rows}\n\n### Slow, and why\n\n{told}\n"
    )


def _rows(found: Examination) -> Iterator[tuple[str, str]]:
    yield "versions", ", ".join(f"{name} {one}" for name, one in found.versions.items())
    yield "built by", ", ".join(f"{name}: {one}" for name, one in found.built.items())
    quota = "" if found.quota is None else f", of which {found.quota:g} at a time"
    yield (
        "processor",
        f"{found.processor}; {found.cores} of {found.all_cores} hardware threads on "
        f"{found.physical_cores} cores{quota}; load {found.load:.1f}",
    )
    sets = ", ".join(found.used_instruction_sets) or "none"
    yield "instruction sets", f"Paceline {sets}; torch {found.torch_capability}"
    asked = "" if found.asked_threads is None else f" (OMP_NUM_THREADS={found.asked_threads})"
    yield "threads of torch", f"{found.threads}{asked}"
    free, whole = (one / 2**30 for one in (found.free_nbytes, found.memory_nbytes))
    yield "memory", f"{free:.1f} GiB free of {whole:.1f} GiB"
    yield "GPUs", "; ".join(_gpu(*one) for one in enumerate(found.gpus)) or _none(found)
    pinned = {None: "not asked: no GPU", True: "can be pinned", False: "cannot be pinned"}
    yield "host memory", pinned[found.pinned]
    networks = [f"{one.name} {_speed(one)}, MTU {one.mtu}" for one in found.networks]
    yield "networks", "; ".join(networks) or "none but loopback"


def _gpu(number: int, gpu: Gpu) -> str:
    reaches = ", ".join(map(str, gpu.reaches)) or "none"
    size = f"{gpu.memory_nbytes / 2**30:.1f} GiB"
    return f"{number}: {gpu.name}, {size}, reaches the memory of {reaches}"


def _none(found: Examination) -> str:
    return (
        "none" if found.unusable_gpus is None else f"none that can be used: {found.unusable_gpus}"
    )


def _speed(network: Network) -> str:
    if network.bit_per_s is None:
        return "of unknown speed"
    return f"{network.bit_per_s / 1e9:g} Gbit/s"
