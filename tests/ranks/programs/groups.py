"""Process groups, uneven inputs, hooks on communication, and what DDP's other arguments do."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from trial import OURS, Trial, gradients, mlp, program, sgd, squares, trained

HOOK = {"refused_by": OURS, "refusal": "hook"}


def normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


@program
def group_of_its_own(trial: Trial) -> Iterator[Any]:
    """process_group= with a second group of the same ranks."""
    model = trial.wrap(normed(), process_group=dist.new_group([0, 1]))
    yield from trained(model, squares(trial))


@program
def group_of_one_rank(trial: Trial) -> Iterator[Any]:
    """Each rank trains with itself: nothing is shared between them."""
    groups = [dist.new_group([rank]) for rank in range(2)]
    model = trial.wrap(normed(), process_group=groups[trial.rank])
    yield from trained(model, squares(trial))


@program
def group_of_rank_1_alone(trial: Trial) -> Iterator[Any]:
    """One rank trains by itself while the other has nothing to do with it."""
    group = dist.new_group([1])
    if trial.rank == 1:
        model = trial.wrap(mlp(), process_group=group)
        yield from trained(model, squares(trial))
    dist.barrier()
    yield "together"


@program
def group_in_another_order(trial: Trial) -> Iterator[Any]:
    """Two groups and two models at the same time, by turns."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    models = [trial.wrap(mlp(), process_group=group) for group in groups]
    for step in range(3):
        for number in (step % 2, 1 - step % 2):
            models[number].zero_grad()
            models[number](trial.batch(step)).square().mean().backward()
        yield step


@program
def mesh_instead_of_a_group(trial: Trial) -> Iterator[Any]:
    model = trial.wrap(mlp(), device_mesh=init_device_mesh("cpu", (2,)))
    yield from trained(model, squares(trial))


@program
def collectives_of_the_user_between_steps(trial: Trial) -> Iterator[Any]:
    """Metrics are reduced and objects gathered on the same group, also between two backwards."""
    model = trial.wrap(normed())
    for loss in trained(model, squares(trial), steps=4):
        total = loss["loss"].detach().clone()
        dist.all_reduce(total)
        told: list[Any] = [None, None]
        dist.all_gather_object(told, {"rank": trial.rank})
        dist.barrier()
        yield [total, told]


@program
def collective_of_the_user_in_forward(trial: Trial) -> Iterator[Any]:
    """Features of all ranks are gathered inside of forward, as CLIP does."""

    class Contrastive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = mlp(6, 8, 4), mlp(6, 8, 4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            one, other = self.one(x), self.other(y)
            gathered = [torch.zeros_like(other) for _ in range(2)]
            dist.all_gather(gathered, other.detach())
            gathered[dist.get_rank()] = other
            return one @ torch.cat(gathered).T

    model = trial.wrap(Contrastive())
    labels = torch.arange(4) + 4 * trial.rank
    yield from trained(
        model,
        lambda model, step: nn.functional.cross_entropy(
            model(trial.batch(step), trial.batch(10 + step)), labels
        ),
    )


@program
def collective_of_the_user_in_backward(trial: Trial) -> Iterator[Any]:
    """torch.distributed.nn's gather has its own collective in the middle of backward."""
    from torch.distributed.nn.functional import all_gather

    model = trial.wrap(mlp(6, 8, 4))

    def loss_of(model: nn.Module, step: int) -> Tensor:
        features = torch.cat(all_gather(model(trial.batch(step)), dist.group.WORLD))
        return (features @ features.T).square().mean()

    yield from trained(model, loss_of)


def _uneven(trial: Trial, model: nn.Module, **options: Any) -> Iterator[Any]:
    """Rank 1 has two batches, rank 0 has four."""
    optimizer = sgd(model)
    with model.join(**options):
        for step in range(4 - 2 * trial.rank):
            optimizer.zero_grad()
            loss = model(trial.batch(step)).square().mean()
            loss.backward()
            yield {"loss": loss, "gradients": gradients(model.module)}
            optimizer.step()
    yield "joined"


@program
def uneven_inputs_in_join(trial: Trial) -> Iterator[Any]:
    yield from _uneven(trial, trial.wrap(normed()))


@program
def uneven_inputs_in_join_divided_by_who_is_there(trial: Trial) -> Iterator[Any]:
    yield from _uneven(trial, trial.wrap(normed()), divide_by_initial_world_size=False)


@program
def uneven_inputs_in_join_with_unused_parameters_sought(trial: Trial) -> Iterator[Any]:
    yield from _uneven(trial, trial.wrap(mlp(), find_unused_parameters=True))


@program(raises="RuntimeError")
def uneven_inputs_that_end_all(trial: Trial) -> Iterator[Any]:
    yield from _uneven(trial, trial.wrap(mlp()), throw_on_early_termination=True)


@program
def join_that_is_not_enabled(trial: Trial) -> Iterator[Any]:
    model = trial.wrap(normed())
    optimizer = sgd(model)
    with model.join(enable=False):
        for step in range(3):
            optimizer.zero_grad()
            model(trial.batch(step)).square().mean().backward()
            yield step
            optimizer.step()


@program
def even_inputs_in_join_and_steps_after_it(trial: Trial) -> Iterator[Any]:
    model = trial.wrap(normed())
    optimizer = sgd(model)
    for _ in range(2):
        with model.join():
            for step in range(2):
                optimizer.zero_grad()
                model(trial.batch(step)).square().mean().backward()
                yield step
                optimizer.step()
    yield from trained(model, squares(trial))


@program
def uneven_inputs_with_accumulation_in_join(trial: Trial) -> Iterator[Any]:
    model = trial.wrap(mlp())
    optimizer = sgd(model)
    with model.join():
        for step in range(4 - 2 * trial.rank):
            if step % 2 == 0:
                with model.no_sync():
                    model(trial.batch(step)).square().mean().backward()
                continue
            model(trial.batch(step)).square().mean().backward()
            yield gradients(model.module)
            optimizer.step()
            optimizer.zero_grad()
    yield "joined"


@program
def uneven_inputs_in_join_with_zero_redundancy(trial: Trial) -> Iterator[Any]:
    """Join over the wrapper and an optimizer that is split over ranks."""
    model = trial.wrap(mlp())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with Join([model, optimizer]):
        for step in range(3 - trial.rank):
            optimizer.zero_grad()
            model(trial.batch(step)).square().mean().backward()
            yield gradients(model.module)
            optimizer.step()
    yield "joined"


@program
def parameters_and_buffers_to_ignore(trial: Trial) -> Iterator[Any]:
    """They are neither sent at construction nor exchanged: each rank has its own."""
    module = normed()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        module, ["0.weight", "1.running_mean"]
    )
    yield from trained(trial.wrap(module), squares(trial))


@program(**HOOK)
def hook_of_the_user(trial: Trial) -> Iterator[Any]:
    model = trial.wrap(mlp())

    def halved(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        tensor = bucket.buffer().div_(4)
        work = dist.all_reduce(tensor, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    model.register_comm_hook(None, halved)
    yield from trained(model, squares(trial))


@program(**HOOK)
def hook_that_communicates_nothing(trial: Trial) -> Iterator[Any]:
    model = trial.wrap(mlp())

    def alone(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, alone)
    yield from trained(model, squares(trial))


@program(**HOOK)
def hooks_that_come_with_torch(trial: Trial) -> Iterator[Any]:
    for hook in (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook):
        model = trial.wrap(mlp())
        model.register_comm_hook(None, hook)
        yield from trained(model, squares(trial))


@program(**HOOK)
def power_sgd(trial: Trial) -> Iterator[Any]:
    model = trial.wrap(mlp(6, 16, 16, 3).float())
    state = PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1
    )
    model.register_comm_hook(state, powerSGD_hook)
    yield from trained(
        model, lambda m, step: m(trial.batch(step, dtype=torch.float32)).square().mean(), steps=4
    )


@program
def hook_that_is_none(trial: Trial) -> Iterator[Any]:
    """What DDP refuses as no hook at all is refused by all exchanges alike."""
    model = trial.wrap(mlp())
    yield trial.refused(lambda: model.register_comm_hook(None, 3)) is not None


@program
def gradients_as_views_of_buckets(trial: Trial) -> Iterator[Any]:
    model = trial.wrap(mlp(), gradient_as_bucket_view=True)
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        model(trial.batch(step)).square().mean().backward()
        yield step
        optimizer.step()


@program
def gradients_as_views_of_a_static_graph(trial: Trial) -> Iterator[Any]:
    model = trial.wrap(mlp(), gradient_as_bucket_view=True, static_graph=True)
    yield from trained(model, squares(trial), steps=4)


@program
def gradients_copied_in_batches(trial: Trial) -> Iterator[Any]:
    yield from trained(trial.wrap(mlp(), batched_grad_copy=True), squares(trial))


@program
def unused_parameters_skipped(trial: Trial) -> Iterator[Any]:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = mlp(), mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    model = trial.wrap(Half(), find_unused_parameters=True, skip_all_reduce_unused_params=True)
    yield from trained(model, squares(trial))


@program(refused_by=OURS, refusal="delay_all_reduce_named_params")
def parameters_whose_exchange_is_delayed(trial: Trial) -> Iterator[Any]:
    """delay_all_reduce_named_params, as DLRM uses it. Nobody waits for that, not even DDP."""
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
        loss = model(trial.batch(step)).square().mean()
        loss.backward()
        yield [loss, module[0].weight.grad, module[2].bias.grad]
        dist.barrier()


@program
def hook_on_buffers(trial: Trial) -> Iterator[Any]:
    """_register_buffer_comm_hook: running statistics become means, not rank 0's."""
    model = trial.wrap(normed())

    def mean(state: Any, buffers: dict[str, Tensor]) -> None:
        for buffer in buffers.values():
            if buffer.is_floating_point():
                dist.all_reduce(buffer)
                buffer.div_(2)

    model._register_buffer_comm_hook(None, mean)
    yield from trained(model, squares(trial))


@program
def logging_data(trial: Trial) -> Iterator[Any]:
    """What monitoring tools read of DDP."""
    model = trial.wrap(mlp())
    yield from trained(model, squares(trial))
    data = model._get_ddp_logging_data()
    yield [data["module_name"], data["world_size"], data["rank"], data["backend_name"]]


@program(raises="RuntimeError", refused_by=OURS, refusal="optimizer_in_backward")
def optimizer_in_backward(trial: Trial) -> Iterator[Any]:
    """_apply_optimizer_in_backward, which DDP can do with accelerators only."""
    from torch.distributed.optim import _apply_optimizer_in_backward

    module = mlp()
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    model = trial.wrap(module)
    for step in range(3):
        model(trial.batch(step)).square().mean().backward()
        yield step
