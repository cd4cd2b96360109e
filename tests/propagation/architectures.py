"""Real architectures at a small size, for the tests: built from transformers' configs or written here, random weights.

Every builder returns ``(model, example inputs)``; :func:`plant` then zeroes rows and columns of the weights at random,
and a few sets that belong together, so that there is something to cut in every kind of layer.
"""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode


class Bottleneck(nn.Module):
    """A residual block of two (`basic`) or three convolutions."""

    def __init__(self, inputs, width, stride, *, basic):
        super().__init__()
        outputs = width if basic else 4 * width
        sizes = [(3, stride), (3, 1)] if basic else [(1, 1), (3, stride), (1, 1)]
        widths = [inputs, *[width] * (len(sizes) - 1), outputs]
        self.convs = nn.ModuleList(
            nn.Conv2d(a, b, k, s, k // 2, bias=False) for a, b, (k, s) in zip(widths, widths[1:], sizes, strict=False)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for b in widths[1:])
        self.skip = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.skip = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        y = x
        for number, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            y = norm(conv(y))
            if number + 1 < len(self.convs):
                y = self.act(y)
        y += self.skip(x)
        return self.act(y)


class ResNet(nn.Module):
    """ResNet-18 (`basic`, 2-2-2-2) and ResNet-50 (bottlenecks, 3-4-6-3) at any width."""

    def __init__(self, depths, *, basic, width=64, classes=10):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        inputs, blocks = width, []
        for stage, depth in enumerate(depths):
            for number in range(depth):
                stride = 2 if stage and not number else 1
                blocks.append(Bottleneck(inputs, width * 2**stage, stride, basic=basic))
                inputs = width * 2**stage * (1 if basic else 4)
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, classes)

    def forward(self, x):
        return self.head(torch.flatten(functional.adaptive_avg_pool2d(self.blocks(self.stem(x)), 1), 1))


class Inverted(nn.Module):
    """MobileNetV2's block: expand, depthwise, project, and a residual where the shapes allow one."""

    def __init__(self, inputs, outputs, stride, expand):
        super().__init__()
        hidden = inputs * expand
        layers = [] if expand == 1 else [nn.Conv2d(inputs, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.ReLU6()]
        self.layers = nn.Sequential(
            *layers,
            nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU6(inplace=True),
            nn.Conv2d(hidden, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x):
        return x + self.layers(x) if self.residual else self.layers(x)


class MobileNetV2(nn.Module):
    """MobileNetV2 with all its 17 blocks, or one of each of its 7 kinds, at any width."""

    def __init__(self, scale=1.0, classes=10, *, repeated=True):
        super().__init__()
        settings = [
            (1, 16, 1, 1),
            (6, 24, 2, 2),
            (6, 32, 3, 2),
            (6, 64, 4, 2),
            (6, 96, 3, 1),
            (6, 160, 3, 2),
            (6, 320, 1, 1),
        ]
        inputs = max(4, int(32 * scale))
        layers = [nn.Conv2d(3, inputs, 3, 2, 1, bias=False), nn.BatchNorm2d(inputs), nn.ReLU6(inplace=True)]
        for expand, width, count, stride in settings:
            outputs = max(4, int(width * scale))
            for number in range(count if repeated else 1):
                layers.append(Inverted(inputs, outputs, 1 if number else stride, expand))
                inputs = outputs
        last = max(8, int(1280 * scale))
        layers += [nn.Conv2d(inputs, last, 1, bias=False), nn.BatchNorm2d(last), nn.ReLU6(inplace=True)]
        self.features = nn.Sequential(*layers)
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(last, classes))

    def forward(self, x):
        return self.head(self.features(x).mean([2, 3]))


class UNet(nn.Module):
    """Three levels down and up, with skips that are concatenated."""

    def __init__(self, width=8):
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(self._double(a, b) for a, b in zip([2, *widths], widths, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in widths[-2::-1])
        self.merge = nn.ModuleList(self._double(2 * w, w) for w in widths[-2::-1])
        self.out = nn.Conv2d(width, 2, 1)

    @staticmethod
    def _double(inputs, outputs):
        norm, act = nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
        first = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        return nn.Sequential(first, norm, act, nn.Conv2d(outputs, outputs, 3, padding=1), nn.ReLU())

    def forward(self, x):
        skips = []
        for level, layer in enumerate(self.down):
            x = layer(x if level == 0 else functional.max_pool2d(x, 2))
            skips.append(x)
        for up, merge, skip in zip(self.up, self.merge, skips[-2::-1], strict=True):
            x = merge(torch.cat([skip, up(x)], 1))
        return self.out(x)


class Experts(nn.Module):
    """A transformer block's mixture of experts: top-2 routing, experts called on the tokens they get by a mask."""

    def __init__(self, width=16, hidden=24, experts=4):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)) for _ in range(experts)
        )

    def forward(self, x):
        y = self.norm(x)
        weights, chosen = self.router(y).softmax(-1).topk(2, -1)
        share = torch.zeros_like(self.router(y)).scatter(-1, chosen, weights)
        return x + sum(expert(y) * share[..., i : i + 1] for i, expert in enumerate(self.experts))


# ---------------------------------------------------------------------- transformers


def _ids(size, batch=2, length=6):
    return torch.randint(0, size, (batch, length))


def vit():
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=16, patch_size=8
    )
    return ViTForImageClassification(config), {"pixel_values": torch.randn(2, 3, 16, 16)}


def bert():
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=60,
        max_position_embeddings=16,
    )  # fmt: skip
    return BertForSequenceClassification(config), {"input_ids": _ids(60), "attention_mask": torch.ones(2, 6).long()}


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=60, n_positions=16, use_cache=False)
    return GPT2LMHeadModel(config), {"input_ids": _ids(60)}


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2, intermediate_size=48,
        vocab_size=60, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config), {"input_ids": _ids(60)}


def _speech(kind):
    config = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
        "conv_dim": (16, 16, 16), "conv_stride": (5, 2, 2), "conv_kernel": (10, 3, 2),
        "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "vocab_size": 12,
    }  # fmt: skip
    if kind == "hubert":
        from transformers import HubertConfig, HubertModel

        return HubertModel(HubertConfig(**config)), {"input_values": torch.randn(2, 400)}
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    return Wav2Vec2ForCTC(Wav2Vec2Config(**config)), {"input_values": torch.randn(2, 400)}


def hubert():
    return _speech("hubert")


def wav2vec2():
    return _speech("wav2vec2")


def _mixture(implementation):
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, intermediate_size=24,
        vocab_size=60, num_local_experts=4, num_experts_per_tok=2, use_cache=False, head_dim=8,
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    model.set_experts_implementation(implementation)
    return model, {"input_ids": _ids(60)}


def mixtral_batched():
    return _mixture("batched_mm")


def mixtral_grouped():
    return _mixture("grouped_mm")


WRITTEN = {
    "resnet18": lambda: (ResNet((2, 1, 1, 1), basic=True, width=8), torch.randn(2, 3, 48, 48)),
    "resnet50": lambda: (ResNet((3, 4, 6, 3), basic=False, width=4), torch.randn(2, 3, 48, 48)),
    "mobilenetv2": lambda: (MobileNetV2(0.25, repeated=False), torch.randn(2, 3, 48, 48)),
    "unet": lambda: (UNet(), torch.randn(2, 2, 16, 16)),
    "experts": lambda: (Experts(), torch.randn(2, 5, 16)),
}
TRANSFORMERS = {
    "vit": vit,
    "bert": bert,
    "gpt2": gpt2,
    "llama": llama,
    "hubert": hubert,
    "wav2vec2": wav2vec2,
    "mixtral batched_mm": mixtral_batched,
    "mixtral grouped_mm": mixtral_grouped,
}


def build(name, seed=0):
    """Return a model in eval mode, with statistics and shifts that are not those of a new model, and its inputs."""
    torch.manual_seed(seed)
    model, inputs = {**WRITTEN, **TRANSFORMERS}[name]()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(std=0.2)
                module.running_var.uniform_(0.5, 1.5)
                module.weight.uniform_(0.5, 1.5)
        for name_, parameter in model.named_parameters():
            if parameter.dim() < 2 and "bias" in name_:
                parameter.normal_(std=0.1)
    return model.eval(), inputs


def plant(model, seed=0, rows=0.2, columns=0.2):
    """Zero rows and columns of every weight at random; experts that are stacked lose the same ones."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2 or not name.endswith(("weight", "proj", "original1")):
                continue
            for dim, share in zip((-2, -1) if name.endswith("proj") else (0, 1), (rows, columns), strict=True):
                chosen = torch.rand(parameter.shape[dim], generator=generator) < share
                parameter.index_fill_(dim, chosen.nonzero().flatten(), 0)
    return model


def flops(model, inputs):
    """Return the multiply-adds (times two) of one forward."""
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else ((inputs,), {})
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(*args, **kwargs)
    return counter.get_total_flops()
