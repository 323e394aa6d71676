"""Process groups, uneven inputs, communication hooks, and other arguments of DDP."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from declared import plain, program, programs, trains
from graphs import half
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn.functional import all_gather
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from steps import alone, backward, joint, learn, mlp, module_of, normed, squares, stepped, trained
from trial import OURS, Run, Trial

HOOK = {"refused_by": OURS, "refusal": "hook"}


def _in(make: Callable[[], nn.Module], where: Callable[[Trial], dict[str, Any]]) -> Run:
    """Return a program that wraps with the options of `where(trial)` and trains."""
    return lambda trial: trained(trial.wrap(make(), **where(trial)), squares(trial))


def group_of_rank_1_alone(trial):
    """Rank 1 trains in its own group, without rank 0."""
    group = dist.new_group([1])
    if trial.rank == 1:
        model = trial.wrap(mlp(), process_group=group)
        yield from trained(model, squares(trial))
    dist.barrier()
    yield "together"


def group_in_another_order(trial):
    """Two models in two groups of the same ranks alternate in a changing order."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    models = [trial.wrap(mlp(), process_group=group) for group in groups]
    for step in range(3):
        for number in (step % 2, 1 - step % 2):
            models[number].zero_grad()
            models[number](trial.batch(step)).square().mean().backward()
        yield step


@trains(normed)
def collectives_of_the_user_between_steps(trial, model):
    """The user reduces metrics and gathers objects in the same group after each backward pass."""
    for loss in trained(model, squares(trial), steps=4):
        total = joint(loss["loss"])
        told: list[Any] = [None, None]
        dist.all_gather_object(told, {"rank": trial.rank})
        dist.barrier()
        yield [total, told]


def collective_of_the_user_in_forward(trial):
    """Forward gathers the features of all ranks, as in CLIP."""

    @module_of(one=mlp(6, 8, 4), other=mlp(6, 8, 4))
    def contrastive(self, x: Tensor, y: Tensor) -> Tensor:
        one, other = self.one(x), self.other(y)
        gathered = [torch.zeros_like(other) for _ in range(2)]
        dist.all_gather(gathered, other.detach())
        gathered[dist.get_rank()] = other
        return one @ torch.cat(gathered).T

    model, labels = trial.wrap(contrastive), torch.arange(4) + 4 * trial.rank
    for step in stepped(model, 3):
        scores = model(trial.batch(step), trial.batch(10 + step))
        yield backward(nn.functional.cross_entropy(scores, labels))


@trains(lambda: mlp(6, 8, 4))
def collective_of_the_user_in_backward(trial, model, step):
    """all_gather of torch.distributed.nn runs a collective during backward."""
    features = torch.cat(all_gather(model(trial.batch(step)), dist.group.WORLD))
    return (features @ features.T).square().mean()


def _uneven(trial: Trial, model: nn.Module, **options: Any) -> Iterator[Any]:
    """Rank 1 has two batches, rank 0 has four."""
    with model.join(**options):
        for step in stepped(model, 4 - 2 * trial.rank):
            yield learn(trial, model, step)
    yield "joined"


programs(
    __name__,
    {
        "uneven_inputs_in_join": lambda trial: _uneven(trial, trial.wrap(normed())),
        "uneven_inputs_in_join_divided_by_active_ranks": lambda trial: _uneven(
            trial, trial.wrap(normed()), divide_by_initial_world_size=False
        ),
        "uneven_inputs_in_join_with_unused_parameters_sought": lambda trial: _uneven(
            trial, trial.wrap(mlp(), find_unused_parameters=True)
        ),
    },
)


@program(raises="RuntimeError")
def uneven_inputs_that_end_all(trial):
    yield from _uneven(trial, trial.wrap(mlp()), throw_on_early_termination=True)


@trains(normed)
def join_that_is_not_enabled(trial, model):
    with model.join(enable=False):
        yield from trained(model, squares(trial))


@trains(normed)
def even_inputs_in_join_and_steps_after_it(trial, model):
    for _ in range(2):
        with model.join():
            yield from trained(model, squares(trial), steps=2)
    yield from trained(model, squares(trial))


def uneven_inputs_with_accumulation_in_join(trial, model):
    with model.join():
        for step in stepped(model, 4 - 2 * trial.rank, every=2):
            yield (learn if step % 2 else alone)(trial, model, step)
    yield "joined"


def uneven_inputs_in_join_with_zero_redundancy(trial, model):
    """Join the wrapper and a ZeroRedundancyOptimizer."""
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with Join([model, optimizer]):
        for step in stepped(optimizer, 3 - trial.rank):
            yield learn(trial, model, step)
    yield "joined"


def parameters_and_buffers_to_ignore(trial):
    """Ignored tensors are neither broadcast nor exchanged: each rank keeps its own."""
    module = normed()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        module, ["0.weight", "1.running_mean"]
    )
    yield from trained(trial.wrap(module), squares(trial))


def _halved(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(bucket.buffer().div_(4), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def _alone(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _hooked(*hooks: Callable[..., Any], state: Callable[[], Any] = lambda: None) -> Run:
    """Return a program that trains once with each hook and a `state()`."""

    def run(trial: Trial) -> Iterator[Any]:
        for hook in hooks:
            model = trial.wrap(mlp(6, 16, 16, 3))
            model.register_comm_hook(state(), hook)
            yield from trained(model, squares(trial), steps=4)

    return run


programs(
    __name__,
    {
        "hook_of_the_user": _hooked(_halved),
        "hook_that_communicates_nothing": _hooked(_alone),
        "hooks_that_come_with_torch": _hooked(
            default_hooks.allreduce_hook, default_hooks.fp16_compress_hook
        ),
        "power_sgd": _hooked(
            powerSGD_hook,
            state=lambda: PowerSGDState(
                None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1
            ),
        ),
    },
    **HOOK,
)


def hook_that_is_not_callable(trial, model):
    """Register a hook that is not callable, which DDP and all exchanges refuse."""
    yield trial.refused(lambda: model.register_comm_hook(None, 3)) is not None


@program(refused_by=OURS, refusal="delay_all_reduce_named_params")
def parameters_whose_exchange_is_delayed(trial):
    """delay_all_reduce_named_params, as in DLRM; even DDP does not wait for that all-reduce."""
    torch.manual_seed(4)
    module = mlp(6, 8, 3)
    delayed = [("2.weight", module[2].weight)]
    model = trial.wrap(
        module,
        watched=False,
        delay_all_reduce_named_params=delayed,
        param_to_hook_all_reduce=module[0].weight,
    )
    for step in range(2):
        for parameter in module.parameters():
            parameter.grad = None
        loss = learn(trial, model, step)
        yield [loss, module[0].weight.grad, module[2].bias.grad]
        dist.barrier()


@trains(normed)
def hook_on_buffers(trial, model):
    """_register_buffer_comm_hook averages running statistics instead of sending rank 0's."""

    def mean(state: Any, buffers: dict[str, Tensor]) -> None:
        for buffer in buffers.values():
            if buffer.is_floating_point():
                dist.all_reduce(buffer)
                buffer.div_(2)

    model._register_buffer_comm_hook(None, mean)
    yield from trained(model, squares(trial))


def logging_data(trial, model):
    """Read DDP's logging data, as monitoring tools do."""
    yield from trained(model, squares(trial))
    data = model._get_ddp_logging_data()
    yield [data["module_name"], data["world_size"], data["rank"], data["backend_name"]]


@program(raises="RuntimeError", refused_by=OURS, refusal="optimizer_in_backward")
def optimizer_in_backward(trial):
    """_apply_optimizer_in_backward, which DDP supports only on accelerators."""
    from torch.distributed.optim import _apply_optimizer_in_backward

    module = mlp()
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    model = trial.wrap(module)
    for step in range(3):
        yield learn(trial, model, step)


programs(
    __name__,
    {
        "gradients_as_views_of_buckets": plain(
            mlp, steps=4, set_to_none=lambda step: step % 2 == 0, gradient_as_bucket_view=True
        ),
        "gradients_as_views_of_a_static_graph": plain(
            mlp, steps=4, gradient_as_bucket_view=True, static_graph=True
        ),
        "gradients_copied_in_batches": plain(mlp, batched_grad_copy=True),
        "unused_parameters_skipped": plain(
            half, find_unused_parameters=True, skip_all_reduce_unused_params=True
        ),
        # A second group of the same ranks.
        "group_of_its_own": _in(normed, lambda trial: {"process_group": dist.new_group([0, 1])}),
        # Each rank trains in its own group.
        "group_of_one_rank": _in(
            normed,
            lambda trial: {"process_group": [dist.new_group([r]) for r in range(2)][trial.rank]},
        ),
        "mesh_instead_of_a_group": _in(
            mlp, lambda trial: {"device_mesh": init_device_mesh("cpu", (2,))}
        ),
    },
)
