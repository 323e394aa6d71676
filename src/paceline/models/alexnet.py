"""AlexNet (Krizhevsky et al., "ImageNet classification with deep CNNs", 2012)."""

from torch import Tensor, nn

from paceline.models.initialize import he_normal_


def _normalize() -> nn.LocalResponseNorm:
    return nn.LocalResponseNorm(size=5, alpha=1e-4, beta=0.75, k=1.0)


class AlexNet(nn.Module):
    """AlexNet on one device, as in Caffe's bvlc_alexnet: (N, 3, 227, 227) to (N, `num_classes`).

    60,965,224 parameters with 1,000 classes. The second, fourth and fifth convolution have two
    groups each, as on the two cards of 2012. The constants of the response normalisation are
    Caffe's (k = 1, alpha divided by the window).
    """

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 96, kernel_size=11, stride=4),
            nn.ReLU(inplace=True),
            _normalize(),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(96, 256, kernel_size=5, padding=2, groups=2),
            nn.ReLU(inplace=True),
            _normalize(),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(256, 384, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(384, 384, kernel_size=3, padding=1, groups=2),
            nn.ReLU(inplace=True),
            nn.Conv2d(384, 256, kernel_size=3, padding=1, groups=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(256 * 6 * 6, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(4096, num_classes),
        )
        he_normal_(self)

    def forward(self, images: Tensor) -> Tensor:
        """Scores (N, `num_classes`) of `images` (N, 3, 227, 227)."""
        scores: Tensor = self.classifier(self.features(images))
        return scores
