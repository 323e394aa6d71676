"""Measure the latency that codecs add to a small all-reduce."""

from functools import partial
from operator import sub
from statistics import median

import torch
import torch.distributed as dist

from paceline.codecs.names import find_codec
from paceline.core.wire_format import Kernel
from paceline.exchange.compressed import CompressedAllReduce
from paceline.links.devices import device_of
from paceline.measure.devices import CODECS
from paceline.measure.timing import Sampler, Work

_NUM_VALUES = 256


def measure_codec_latencies(sampler: Sampler, deadline_s: float) -> dict[Kernel, float]:
    """Return, for each codec, half of the seconds that it adds to a small all-reduce.

    An all-reduce encodes and decodes twice. Requires two or more ranks.
    """
    group = sampler.group
    all_reduce = CompressedAllReduce(range(group.world_size), group.device, deadline_s)
    values = torch.zeros(_NUM_VALUES, device=group.device)

    def reduce(codec: str | None) -> None:
        if codec is None:
            dist.all_reduce(values)
        else:
            all_reduce.begin(codec, values, partial(find_codec, codec)).future.wait()
        device_of(group.device).synchronize()

    codecs = [None, *(names[0] for names in CODECS.values())]
    works: list[Work] = [partial(reduce, codec) for codec in codecs]
    without, *with_codecs = sampler.of_last(works, range(group.world_size))
    latencies = {
        kernel: max(0.0, median(map(sub, seconds, without)) / 2)
        for kernel, seconds in zip(CODECS, with_codecs, strict=True)
    }
    all_reduce.close()
    return latencies
