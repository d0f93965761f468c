"""Networks that several measurements use: convolutional and residual networks, and a small ViT."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from residuum.networks.network import first_layer
from residuum.networks.spectrum import rank_above, singular_values


class CNN(nn.Module):
    """Two convolutions and two dense layers."""

    def __init__(self, pooled: bool = False, shape: tuple[int, int, int] = (1, 28, 28)) -> None:
        super().__init__()
        stride = 1 if pooled else 2
        self.pooled, side = pooled, shape[1] // 4
        self.c1 = nn.Conv2d(shape[0], 16, 3, stride, padding=1)
        self.c2 = nn.Conv2d(16, 32, 3, stride, padding=1)
        self.f1, self.f2 = nn.Linear(32 * side * side, 12), nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.c1, self.c2):
            x = F.relu(layer(x))
            x = F.max_pool2d(x, 2) if self.pooled else x
        return self.f2(F.relu(self.f1(x.flatten(1))))


class AsksHost(CNN):
    """A branch on a value, which no CUDA graph can hold."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 if float(x.detach().abs().max()) < 1e9 else 2.0)


class Residual(nn.Module):
    """Two convolutions with a skip connection (He et al. 2015)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.c1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.c2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.n1, self.n2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.around = nn.Sequential()
        if stride > 1 or inputs != width:
            self.around = nn.Sequential(
                nn.Conv2d(inputs, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        z = self.relu(self.n1(self.c1(x)))
        return self.relu(self.n2(self.c2(z)) + self.around(x))


def resnet(
    widths: tuple[int, ...] = (64, 128, 256, 512),
    blocks: int = 2,
    channels: int = 3,
    outputs: int = 10,
) -> nn.Module:
    """Return a ResNet-18 for small images: a 3 x 3 stem and no pooling before the blocks."""
    stem = [
        nn.Conv2d(channels, widths[0], 3, 1, 1, bias=False),
        nn.BatchNorm2d(widths[0]),
        nn.ReLU(True),
    ]
    layers, inputs = [], widths[0]
    for i, width in enumerate(widths):
        for k in range(blocks):
            layers.append(Residual(inputs, width, 2 if i and not k else 1))
            inputs = width
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, outputs)]
    return nn.Sequential(*stem, *layers, *head)


class ViT(nn.Module):
    """Patches of 2 x 2, two layers of attention, and the mean of all places."""

    def __init__(self, channels: int = 1, side: int = 8, width: int = 24) -> None:
        super().__init__()
        self.patch = nn.Conv2d(channels, width, 2, stride=2)
        self.place = nn.Parameter(0.02 * torch.randn((side // 2) ** 2, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, 0.1, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.patch(x).flatten(2).transpose(1, 2) + self.place).mean(1))


def first_layer_rank(theta: dict[str, Tensor]) -> int:
    """Return the number of singular values of the first layer above 1% of the largest."""
    return rank_above(singular_values(first_layer(theta)), 0.01)
