"""Lightning's Trainer with Paceline: torchrun --nproc-per-node 2 train_with_lightning.py."""

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from paceline.integrations.lightning import PacelineStrategy


class Digits(lightning.LightningModule):
    """Tells handwritten digits apart."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        """Return the loss of a batch."""
        inputs, targets = batch
        loss = cross_entropy(self.net(inputs), targets)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        """Note the accuracy on a batch."""
        inputs, targets = batch
        found = (self.net(inputs).argmax(1) == targets).float().mean()
        self.log("accuracy", found, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return what updates the weights."""
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


lightning.seed_everything(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
samples = TensorDataset(images, torch.tensor(digits.target))
loader = DataLoader(samples, batch_size=32)  # Lightning gives each rank its share

model = Digits()
trainer = lightning.Trainer(
    strategy=PacelineStrategy(exchange="host"),
    accelerator="cpu",
    devices=2,
    max_epochs=4,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(model, loader, loader)

if trainer.is_global_zero:
    accuracy = trainer.callback_metrics["accuracy"]
    print(f"loss {model.losses[-1]:.4f}, accuracy {accuracy:.2%} of the samples", end=" ")
    print("that it was trained with")
