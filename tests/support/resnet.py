"""A residual network in the manner of He et al. 2015, with BatchNorm and in-place ReLU; tiny."""

from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with BatchNorm, and a shortcut. Images [n, c_in, h, w] -> [n, c_out, h/stride, w/stride]."""

    def __init__(self, channels_in: int, channels_out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels_out)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride, bias=False), nn.BatchNorm2d(channels_out)
            )

    def forward(self, image: Tensor) -> Tensor:
        hidden = self.relu(self.norm1(self.conv1(image)))
        hidden = self.norm2(self.conv2(hidden))
        hidden += self.shortcut(image)
        return self.relu(hidden)


class ResNet(nn.Module):
    """Images [n, 3, h, w] -> logits [n, 5]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.stages = nn.Sequential(BasicBlock(8, 8), BasicBlock(8, 16, stride=2), BasicBlock(16, 16))
        self.head = nn.Linear(16, 5)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(image)).mean((2, 3)))
