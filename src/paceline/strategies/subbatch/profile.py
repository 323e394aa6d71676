"""Measure each part of a step separately, and count the bytes that workers send in a plan.

The profile runs real steps, but without overlap: each exchange ends before the next computation
begins, and the body's gradients are exchanged after its backward pass. A simulation of the plan
then predicts the overlap of normal steps.
"""

from typing import get_args

from torch import nn
from torch.optim import Optimizer

from paceline.core.cost import ProfiledCost, Rate, Roofline
from paceline.core.link_fit import LinearTime, linked_in_ring
from paceline.core.machine import CodecSpeed, Machine
from paceline.core.plan import COMPUTE, Kind, PriceKey
from paceline.core.strategy import PricedMachine, Window
from paceline.core.timeline import Timeline
from paceline.core.wire_format import Kernel
from paceline.core.workload import Workload
from paceline.exchange.setup import TrainingSetup
from paceline.links.clock import clock_for
from paceline.links.devices import random_numbers_restored
from paceline.links.group import Group
from paceline.measure.this_machine import this_machine
from paceline.measure.timing import endless, median_durations, num_rounds, unrest_of_traced
from paceline.record.merge import clock_offset, gather_timeline
from paceline.record.recorder import Recorder
from paceline.strategies.subbatch.config import SubBatch
from paceline.strategies.subbatch.plan import LABELS, LOSS, plan
from paceline.strategies.subbatch.trainer import SplitModel, SplitTrainer
from paceline.training.models.halves import values_restored

ANY_SPEED = Rate(1e9, 1e9)  # arbitrary, because the profile measures every part of a step
_NUM_WARM_UP = 2
_FEWEST_STEPS, _MOST_STEPS = 3, 40
_WITHIN_LINKS = CodecSpeed(encode_values_per_s=float("inf"), decode_values_per_s=float("inf"))
_ANY_LINE = LinearTime(0.0, 1e-9)  # arbitrary, because the profile measures every exchange
_LEARNING_RATE = 1e-6  # small, to avoid NaNs and denormals, which would change computing times


def profile(
    model: SplitModel, trainee: TrainingSetup, config: SubBatch, group: Group, seconds: float
) -> PricedMachine:
    """Measure steps for about `seconds`; return the machine and a cost model.

    All ranks must call it together. Restores the model's parameters and buffers, and the random
    number generator.
    """
    machine = this_machine(group, [ANY_SPEED] * group.world_size)
    tensors = *model.module.parameters(), *model.module.buffers()
    with values_restored(tensors), random_numbers_restored(()):
        timeline = _traced(model, trainee, config, group, machine, seconds)
    model.module.zero_grad()
    return _calibrated(timeline, trainee.workload, machine, config)


def _traced(
    model: SplitModel,
    trainee: TrainingSetup,
    config: SubBatch,
    group: Group,
    machine: Machine,
    seconds: float,
) -> Timeline:
    """Take steps for about `seconds`; return their timeline on all ranks."""
    recorder = Recorder(clock_for(group.device), machine.devices[group.rank].name, group.rank)

    def optimizer(module: nn.Module) -> Optimizer:
        made = trainee.optimizer(module)
        for parameters in made.param_groups:
            parameters["lr"] = _LEARNING_RATE
        return made

    trainer = SplitTrainer(model, config, group, recorder, optimizer, learning=trainee.learning)
    shares = endless(lambda: trainee.source(0))
    trainer.thread.is_synchronous = True
    for _ in range(1 + _NUM_WARM_UP):
        trainer.step(shares)
    first, *_, last = recorder.step_ends()
    longest_s = max(group.gather((last - first) / _NUM_WARM_UP))
    num_steps = num_rounds(seconds, longest_s, _FEWEST_STEPS, _MOST_STEPS)
    trainer.replica.record(recorder)
    recorder.start_trace(model.body)
    for _ in range(num_steps):
        trainer.step(shares)
    recorder.stop_trace()
    timeline = gather_timeline(recorder.spans(), clock_offset(group), group)
    trainer.close()
    return timeline


def _calibrated(
    timeline: Timeline, workload: Workload, machine: Machine, config: SubBatch
) -> PricedMachine:
    """Return the machine, and a cost model with the median measured time of each task."""
    spans = timeline.spans
    losses = machine.usual_losses.model_copy(update={"unrest": unrest_of_traced(spans)})
    machine = machine.model_copy(update={"losses": losses})
    # Keys of measured times: a layer's key has no sub-batch, because it should take equally long in
    # all sub-batches. An exchange's key has no owner, because all workers take part.
    computed = median_durations(
        [span for span in spans if span.kind in COMPUTE],
        lambda span: PriceKey(span.on[0].owner, span.kind, span.part),
    )
    exchanged = median_durations(
        [span for span in spans if span.kind not in COMPUTE],
        lambda span: PriceKey("", span.kind, span.part, span.sub_batch),
    )
    if len(machine.devices) > 1:
        # Measured exchanges include encoding and decoding, so codecs take no more time in the plan.
        machine = linked_in_ring(machine, machine.devices, _ANY_LINE)
        codecs = dict.fromkeys(get_args(Kernel), _WITHIN_LINKS)
        machine = machine.with_each("hosts", codecs=codecs).with_each("devices", codecs=codecs)
    durations: dict[PriceKey, float] = {}
    for task in plan(workload, machine, config, Window(1)).tasks:
        key = task.price_key
        if task.kind not in COMPUTE:
            durations[key] = exchanged[key._replace(owner="")]
        elif (alike := key._replace(sub_batch=None)) in computed:
            durations[key] = computed[alike]
    return PricedMachine(machine, ProfiledCost(durations, Roofline.of(machine)))


def planned_nbytes(workload: Workload, machine: Machine, config: SubBatch) -> dict[str, float]:
    """Return the planned bytes that each worker sends per step, by purpose such as "loss"."""
    if len(machine.devices) > 1:
        # Plans count an exchange's bytes per host, so give each worker a host of its own.
        names = [f"host{i}" for i in range(len(machine.devices))]
        hosts = tuple(machine.hosts[0].model_copy(update={"name": name}) for name in names)
        devices = tuple(
            device.model_copy(update={"host": name})
            for device, name in zip(machine.devices, names, strict=True)
        )
        spread = machine.model_copy(update={"hosts": hosts, "devices": devices})
        machine = linked_in_ring(spread, devices, _ANY_LINE)
    nbytes = {"activations": 0.0, "activation_gradients": 0.0, "loss": 0.0, "gradients": 0.0}
    for task in plan(workload, machine, config, Window(1)).tasks:
        if task.kind is Kind.SEND:
            purpose = "loss" if task.part in (LABELS, LOSS) else "activations"
            nbytes[purpose] += task.cost.nbytes
        elif task.kind is Kind.REDUCE:
            is_body = task.id.sub_batch is None
            nbytes["gradients" if is_body else "activation_gradients"] += task.cost.nbytes
    return nbytes
