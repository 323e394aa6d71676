"""LeNet-5 (LeCun et al., "Gradient-based learning applied to document recognition", 1998)."""

from torch import nn


class LeNet5(nn.Sequential):
    """LeNet-5 in its common modern form: images (N, 1, 32, 32) to scores (N, `num_classes`).

    61,706 parameters with ten classes. The original has 60,000: its second convolution sees only
    some of the maps before it, its poolings have a trainable coefficient and bias per map, and its
    output units measure distances to fixed codes. `docs/models.md` counts the difference.
    """

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, kernel_size=5)
        self.tanh1 = nn.Tanh()
        self.pool1 = nn.AvgPool2d(2)
        self.conv2 = nn.Conv2d(6, 16, kernel_size=5)
        self.tanh2 = nn.Tanh()
        self.pool2 = nn.AvgPool2d(2)
        self.flatten = nn.Flatten()
        self.fc3 = nn.Linear(16 * 5 * 5, 120)
        self.tanh3 = nn.Tanh()
        self.fc4 = nn.Linear(120, 84)
        self.tanh4 = nn.Tanh()
        self.fc5 = nn.Linear(84, num_classes)
