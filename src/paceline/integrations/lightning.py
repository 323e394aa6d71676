"""A strategy of Lightning's Trainer that trains with paceline.DataParallel."""

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.plugins import DeepSpeedPrecision, FSDPPrecision
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState

from paceline.core.errors import InvalidInput
from paceline.integrations.data_parallel import DataParallel, check_hook


class PacelineStrategy(DDPStrategy):
    """Trains with DataParallel, one process a device: `Trainer(strategy=PacelineStrategy())`.

    Takes what DDPStrategy takes; what that passes on to DistributedDataParallel goes to
    DataParallel, with its `exchange`, `codec` and so on. Once this module is imported,
    `Trainer(strategy="paceline")` means the same.

    A communication hook is registered on CPUs, too. Raises InvalidInput for one that would not run.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self._ddp_comm_hook is not None:
            check_hook("ddp_comm_hook", self._ddp_kwargs.get("exchange", "auto"))
        elif self._ddp_comm_wrapper is not None or self._ddp_comm_state is not None:
            raise InvalidInput("ddp_comm_state, ddp_comm_wrapper", "nothing without ddp_comm_hook")
        averages = isinstance(self._ddp_comm_state, PostLocalSGDState)
        if self._model_averaging_period is not None and not averages:
            raise InvalidInput(
                "model_averaging_period", "is for a ddp_comm_state PostLocalSGDState"
            )

    def setup(self, trainer: Trainer) -> None:
        """Wrap the LightningModule, and make its optimizers."""
        if isinstance(self.precision_plugin, DeepSpeedPrecision | FSDPPrecision):
            raise InvalidInput(
                "precision",
                f"{type(self.precision_plugin).__name__} is for models that are split between "
                "ranks",
                hint="say Trainer(precision=...)",
            )
        super().setup(trainer)

    def _setup_model(self, model: nn.Module) -> DataParallel:
        return DataParallel(model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs)

    def _register_ddp_hooks(self) -> None:
        if self._ddp_comm_hook is None:
            return
        hook, wrap = self._ddp_comm_hook, self._ddp_comm_wrapper
        assert isinstance(self.model, DataParallel)
        self.model.register_comm_hook(self._ddp_comm_state, wrap(hook) if wrap else hook)

    def teardown(self) -> None:
        """Stop exchanging, and leave the LightningModule as it was given."""
        if isinstance(self.model, DataParallel):
            self.model.close()
            self.model = self.lightning_module
        super().teardown()


StrategyRegistry.register(
    "paceline", PacelineStrategy, description="DDP by paceline.DataParallel", override=True
)
