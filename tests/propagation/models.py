"""Small models of the real kinds, for the tests: each with zeros planted in rows and columns."""

import torch
from torch import nn
from torch.nn import functional


class Residual(nn.Module):
    """A residual CNN with batch norm, a depthwise convolution and a strided block."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.first, self.norm1 = nn.Conv2d(8, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12)
        self.depthwise = nn.Conv2d(12, 12, 3, padding=1, groups=12)
        self.second, self.norm2 = nn.Conv2d(12, 8, 1, bias=False), nn.BatchNorm2d(8)
        self.down, self.head = nn.Conv2d(8, 6, 3, stride=2), nn.Linear(6, 4)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        x = functional.max_pool2d(self.act(self.norm(self.stem(x))), 2)
        y = functional.hardswish(self.depthwise(self.act(self.norm1(self.first(x)))))
        x = self.act(self.norm2(self.second(y)) + x)
        return self.head(functional.adaptive_avg_pool2d(self.act(self.down(x)), 1).flatten(1))


class UNet(nn.Module):
    """Down, up, and a skip that is concatenated."""

    def __init__(self):
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(2, 6, 3, padding=1), nn.Conv2d(6, 8, 3, padding=1)
        self.up, self.out = nn.ConvTranspose2d(8, 6, 2, stride=2), nn.Conv2d(12, 2, 1)

    def forward(self, x):
        skip = functional.relu(self.down1(x))
        low = functional.relu(self.down2(functional.avg_pool2d(skip, 2)))
        return self.out(torch.cat([skip, self.up(low)], 1))


class Attention(nn.Module):
    """GPT-2-style: fused queries, keys and values, unfused softmax attention with a causal mask."""

    def __init__(self, width=16, heads=4):
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("hidden", torch.ones(64, 64, dtype=torch.bool).triu(1))

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.qkv(self.norm(x)).split(width, -1)
        q, k, v = (p.view(batch, length, self.heads, -1).transpose(1, 2) for p in parts)
        scores = q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5
        weights = scores.masked_fill(self.hidden[:length, :length], -torch.inf).softmax(-1)
        return x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))


class Llama(nn.Module):
    """Grouped queries, rotary positions, SwiGLU, RMS norm, and a head that is tied to the embedding."""

    def __init__(self, width=32, heads=8, groups=2, hidden=24):
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.embedding, self.head = nn.Embedding(20, width), nn.Linear(width, 20, bias=False)
        self.head.weight = self.embedding.weight
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, groups * self.size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)
        self.norm1, self.norm2 = nn.Parameter(torch.rand(width)), nn.RMSNorm(width)
        self.register_buffer("frequencies", 100 ** (-torch.arange(0, self.size, 2) / self.size))

    def turned(self, x, cos, sin):
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    def forward(self, ids):
        batch, length = ids.shape
        x = self.embedding(ids)
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.norm1
        with torch.no_grad():
            angles = torch.arange(length, device=ids.device)[:, None] * self.frequencies
            angles = torch.cat([angles, angles], -1)
        q = self.q(y).view(batch, length, self.heads, -1).transpose(1, 2)
        k, v = (layer(y).view(batch, length, self.groups, -1).transpose(1, 2) for layer in (self.k, self.v))
        q, k = (self.turned(t, angles.cos(), angles.sin()) for t in (q, k))
        each = self.heads // self.groups
        k, v = (
            t[:, :, None].expand(batch, self.groups, each, length, self.size).reshape(batch, self.heads, length, -1)
            for t in (k, v)
        )
        a = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, -1)
        x = x + self.o(a)
        y = self.norm2(x)
        return self.head(x + self.down(functional.silu(self.gate(y)) * self.up(y)))


class Experts(nn.Module):
    """Top-2 of 4 experts, all computed and mixed by a routing matrix."""

    def __init__(self, width=8, hidden=10, experts=4):
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, hidden))
        self.down = nn.Parameter(torch.randn(experts, hidden, width))

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        mixing = torch.zeros(x.shape[0], 4, dtype=x.dtype).scatter(1, chosen, weights)
        each = torch.relu(torch.matmul(x, self.up)) @ self.down
        return x + torch.einsum("te,etd->td", mixing, each)


def plant_mlp():
    model = nn.Sequential(nn.Linear(6, 9), nn.Sigmoid(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 2))
    model[0].weight[2:5] = 0
    model[4].weight[:, 1:3] = 0
    return model, torch.randn(4, 6), ["0.weight", "2.weight", "2.bias", "4.weight"]


def plant_residual():
    model = Residual()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.bias.normal_()
    model.first.weight[[2, 5]] = 0
    model.second.weight[:, 7:9] = 0
    model.down.weight[1] = 0
    model.head.weight[:, 3] = 0
    return model.eval(), torch.randn(2, 3, 10, 10), ["first.weight", "depthwise.weight", "second.weight"]


def plant_unet():
    model = UNet()
    model.down2.weight[1:4], model.down2.bias[1:3] = 0, 0
    model.out.weight[:, 8:10] = 0
    return model, torch.randn(2, 2, 8, 8), ["down2.weight", "up.weight", "out.weight"]


def plant_encoder():
    model = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True).eval()
    model.linear1.weight[3:7] = 0
    model.linear2.weight[:, 10:14] = 0
    model.self_attn.out_proj.weight[:, 4:8] = 0
    names = ["self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight"]
    return model, torch.randn(2, 6, 16), names


def plant_gpt2():
    model = Attention()
    model.out.weight[:, 8:12] = 0
    return model, torch.randn(2, 6, 16), ["qkv.weight", "qkv.bias", "out.weight"]


def plant_llama():
    model = Llama()
    model.o.weight[:, :16] = 0
    model.down.weight[:, 3:6] = 0
    model.gate.weight[8:12] = 0
    model.up.weight[20:] = 0
    names = ["q.weight", "k.weight", "v.weight", "o.weight", "gate.weight", "up.weight", "down.weight"]
    return model, torch.randint(0, 20, (2, 5)), names


def plant_experts():
    model = Experts()
    model.up[:, :, 2:5] = 0
    model.down[:, 7] = 0
    return model, torch.randn(5, 8), ["up", "down"]


_PLANT = {
    "mlp": plant_mlp,
    "residual": plant_residual,
    "unet": plant_unet,
    "encoder": plant_encoder,
    "gpt2": plant_gpt2,
    "llama": plant_llama,
    "experts": plant_experts,
}
MODELS = list(_PLANT)


def planted(name):
    """Return a model with zeros planted, an example, and the parameters that must come out smaller."""
    torch.manual_seed(1)
    with torch.no_grad():
        return _PLANT[name]()
