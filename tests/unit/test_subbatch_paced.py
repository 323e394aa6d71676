"""Layers of a head that are paced take as long as the plan says, for every sub-batch."""

from dataclasses import replace

import pytest
import torch

from paceline.core.cost import PacedDevice, Rate, Roofline, Totals
from paceline.core.plan import Kind, PriceKey
from paceline.core.strategy import Window
from paceline.core.workload import Cost
from paceline.strategies.subbatch import paced
from paceline.strategies.subbatch.config import SubBatch
from paceline.strategies.subbatch.layers import DropoutMasks
from paceline.strategies.subbatch.paced import paced_model
from paceline.strategies.subbatch.plan import plan, weights_of
from subbatches import BATCH, CONV, FC1, FC2, FEATURES, model, ring_of

NBYTES_PER_S, CALL_S = 2e3, 0.25
FAST = {"memory_bandwidth_bytes_per_s": NBYTES_PER_S, "call_latency_s": CALL_S}
RATE = Rate(1e9, NBYTES_PER_S, CALL_S)


def moving(layer):
    """A layer that moves its weights and some bytes a sample, and does no arithmetic."""
    forward, backward = Cost(0, layer.gradient_nbytes + 960, 1), Cost(0, 0, 2)
    backward = replace(backward, nbytes=2 * layer.gradient_nbytes + 1920)
    return replace(layer, forward=forward, backward=backward)


# Parameters have names as models have them.
BODY = replace(
    CONV, parameters=tuple(replace(one, name=f"conv.{one.name}") for one in CONV.parameters)
)
NET = model(BODY, moving(FC1), moving(FC2))


@pytest.mark.parametrize("sub_batch", [None, 2, 6, 10, 24])
@pytest.mark.parametrize("totals", [Totals(), Totals(30.0, 90.0)])
def test_each_sub_batch_takes_what_the_plan_says(monkeypatch, sub_batch, totals):
    slept: list[float] = []
    monkeypatch.setattr(paced.time, "sleep", slept.append)
    config, machine = SubBatch(2, sub_batch=sub_batch), ring_of(2, **FAST)
    device = PacedDevice("paced as a test", RATE, "gpu", totals)
    layer = paced_model(NET, config, 0, device).head[0]
    forward_scale = backward_scale = 1.0
    if totals.forward_s is not None and totals.backward_s is not None:
        whole = PacedDevice("unscaled", RATE, "gpu").times(NET)
        forward_scale = totals.forward_s / sum(whole.forward_s)
        backward_scale = totals.backward_s / sum(whole.backward_s)
    roofline = Roofline.of(machine)
    tasks = {task.price_key: task for task in plan(NET, machine, config, Window(1)).tasks}
    num_passes = config.num_sub_batches(BATCH)
    for number in range(num_passes):
        rows = 2 * (BATCH // num_passes + (number < BATCH % num_passes))
        values, masks = torch.zeros(rows, FEATURES), DropoutMasks(0, 0, 2 * BATCH)
        outputs = layer.forward(number, values, torch.arange(rows), masks)
        layer.backward_input(number, outputs, 1.0)
        layer.backward_weight(number, 1.0)
        keys = (
            PriceKey("gpu0", Kind.FORWARD, "fc1", number),
            PriceKey("gpu0", Kind.BACKWARD, "fc1", number),
            PriceKey("gpu0", Kind.BACKWARD, weights_of("fc1"), number),
        )
        seconds = [roofline.seconds(tasks[key]) for key in keys]
        scales = (forward_scale, backward_scale, backward_scale)
        expected = [scale * one for scale, one in zip(scales, seconds, strict=True)]
        assert slept[-3:] == pytest.approx(expected)
