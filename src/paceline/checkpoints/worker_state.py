"""Save and load one worker's state: the optimizer of each thread, and random number generators."""

from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer

from paceline.checkpoints.json_values import Json
from paceline.checkpoints import state
from paceline.checkpoints.tensor_file import Tensors, within
from paceline.core.errors import InvalidInput
from paceline.links.devices import Device


def state_of(optimizers: Sequence[Optimizer], device: Device) -> tuple[Tensors, Json]:
    """Return the state of a worker's optimizers, one per thread, and random number generators."""
    random, random_values = state.random_state(device.torch_device)
    tensors = {f"random/{key}": one for key, one in random.items()}
    values = []
    for number, optimizer in enumerate(optimizers):
        own, plain = state.optimizer_state(optimizer, _numbered(optimizer))
        tensors |= {f"{number}/{key}": one for key, one in own.items()}
        values.append(plain)
    tensors = {name: one.detach().cpu() for name, one in tensors.items()}
    return tensors, {"optimizers": values, "random": random_values}


def load_state(
    optimizers: Sequence[Optimizer], device: Device, tensors: Tensors, values: Json
) -> None:
    """Load the state that `state_of` returned; raises InvalidInput if the optimizers differ."""
    for number, (optimizer, plain) in enumerate(zip(optimizers, values["optimizers"], strict=True)):
        own = within(tensors, f"{number}/")
        state.load_optimizer_state(optimizer, _numbered(optimizer), own, plain)
    state.restore_random_state(device.torch_device, within(tensors, "random/"), values["random"])


def _numbered(optimizer: object) -> list[tuple[str, Tensor]]:
    """Name the parameters by index, since an optimizer does not know their names."""
    if not isinstance(optimizer, Optimizer):
        problem = "must be a torch.optim.Optimizer to be saved"
        raise InvalidInput("optimizer", problem, got=type(optimizer).__name__)
    own = (one for group in optimizer.param_groups for one in group["params"])
    return [(str(number), one) for number, one in enumerate(own)]
