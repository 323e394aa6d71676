"""VGG-16 (Simonyan and Zisserman, "Very deep convolutional networks", 2014, model D)."""

from torch import Tensor, nn

from paceline.models.initialize import he_normal_

# The 3x3 convolutions of each block, by output channels; every block ends in a 2x2 pooling.
_BLOCKS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


def _block(in_channels: int, widths: tuple[int, ...]) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for width in widths:
        layers += [nn.Conv2d(in_channels, width, kernel_size=3, padding=1), nn.ReLU(inplace=True)]
        in_channels = width
    return [*layers, nn.MaxPool2d(2)]


class VGG16(nn.Module):
    """VGG-16: images (N, 3, 224, 224) to scores (N, `num_classes`).

    138,357,544 parameters with 1,000 classes.
    """

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        inputs = (3, *(widths[-1] for widths in _BLOCKS))
        layers = [layer for pair in zip(inputs, _BLOCKS, strict=False) for layer in _block(*pair)]
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(512 * 7 * 7, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(4096, num_classes),
        )
        he_normal_(self)

    def forward(self, images: Tensor) -> Tensor:
        """Scores (N, `num_classes`) of `images` (N, 3, 224, 224)."""
        scores: Tensor = self.classifier(self.features(images))
        return scores
