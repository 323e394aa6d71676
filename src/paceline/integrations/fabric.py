"""A strategy of Lightning Fabric that trains with paceline.DataParallel."""

from lightning.fabric.plugins import DeepSpeedPrecision, FSDPPrecision
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.ddp import DDPStrategy
from torch import nn

from paceline.core.errors import InvalidInput
from paceline.integrations.data_parallel import DataParallel


class PacelineStrategy(DDPStrategy):
    """Trains with DataParallel, one process a device: `Fabric(strategy=PacelineStrategy())`.

    Takes what DDPStrategy takes; what that passes on to DistributedDataParallel goes to
    DataParallel, with its `exchange`, `codec` and so on. Once this module is imported,
    `Fabric(strategy="paceline")` means the same.
    """

    def setup_module(self, module: nn.Module) -> DataParallel:
        """Wrap the model that `Fabric.setup` was given."""
        if isinstance(module, DataParallel):
            raise InvalidInput(
                "model", "is a DataParallel already", hint="give Fabric the module in it"
            )
        if isinstance(self.precision, DeepSpeedPrecision | FSDPPrecision):
            raise InvalidInput(
                "precision",
                f"{type(self.precision).__name__} is for models that are split between ranks",
                hint="say Fabric(precision=...)",
            )
        return DataParallel(module, device_ids=self._determine_ddp_device_ids(), **self._ddp_kwargs)


STRATEGY_REGISTRY.register(
    "paceline", PacelineStrategy, description="DDP by paceline.DataParallel", override=True
)
