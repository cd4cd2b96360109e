"""Small models to compile, and how to prune them."""

import torch
from torch import nn

import sparta


class Mlp(nn.Module):
    def __init__(self, width=32, hidden=48, outputs=5):
        super().__init__()
        self.first = nn.Linear(width, hidden)
        self.second = nn.Linear(hidden, hidden)
        self.last = nn.Linear(hidden, outputs, bias=False)

    def forward(self, x):
        h = torch.relu(self.first(x))
        return self.last(nn.functional.gelu(self.second(h)) + h)


class Attention(nn.Module):
    """A transformer block with its own calling conventions: keywords, a mask, nested results."""

    def __init__(self, width=32, heads=4):
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(width), heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x, mask=None, *, scale=1.0):
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.drop(self.out(y.transpose(1, 2).reshape(b, t, w))) * scale
        return {"hidden": x + self.down(nn.functional.silu(self.up(x))), "pair": (x, x.mean(1))}


class Cnn(nn.Module):
    """Convolutions with BatchNorm, a residual, a pool and a linear layer with BatchNorm."""

    def __init__(self, width=16):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        self.body = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.side = nn.Sequential(nn.Conv2d(width, width, 1, bias=False), nn.BatchNorm2d(width, affine=False))
        self.head = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, 4))

    def forward(self, x):
        x = self.stem(x)
        x = torch.relu(x + self.side(self.body(x)))
        return self.head(x.mean((2, 3)))


class Residual(nn.Module):
    """A block of a ResNet, with a convolution in its shortcut: the last ReLU comes after the sum."""

    def __init__(self, width=16):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.short = nn.Sequential(nn.Conv2d(width, width, 1, 2, bias=False), nn.BatchNorm2d(width))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        y += self.short(x)
        return self.relu(y)


def pruned(model, pattern=None, sparsity=0.8, include=None):
    """Prune a model's weights and shake its BatchNorms, so that folding them is no identity."""
    sparta.Spec.from_pattern(model, pattern or sparta.Block(4, 1), sparsity, include=include).apply(model)
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2.0)
            if module.affine:
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.normal_(module.bias)
    return model.eval()
