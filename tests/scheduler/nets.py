"""Small networks, data that can be learnt, and a training loop as a user would write it."""

import torch
from torch import nn


class SmallNet(nn.Module):
    """Convolutions with a stride, a residual, batch norms, and a linear head, on 3 × 8 × 8 images."""

    def __init__(self, width=16):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(2 * width, 4)

    def forward(self, x):
        x = torch.relu(self.norm(self.stem(x)))
        x = x + torch.relu(self.norm1(self.conv1(x)))
        x = torch.relu(self.conv2(x))
        return self.fc(torch.flatten(self.pool(x), 1))


def small_net(seed=0, width=16):
    torch.manual_seed(seed)
    return SmallNet(width)


def batch(step, size=16):
    """Images whose class is the colour that is brightest, or none; the same for the same step."""
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(0, 4, (size,), generator=generator)
    images = 0.5 * torch.randn(size, 3, 8, 8, generator=generator)
    for image, label in zip(images, labels.tolist(), strict=True):
        image[label : label + 1] += 0.5
    return images, labels


def step_of(model, optimizer, step):
    images, labels = batch(step)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


@torch.no_grad()
def accuracy(model):
    model.eval()
    images, labels = batch(10_000, 200)
    return float((model(images).argmax(1) == labels).float().mean())
