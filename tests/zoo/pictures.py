"""Networks for pictures and others that are not from transformers: timm, torchvision, and some written here.

timm and torchvision are optional: a row whose package is missing is left out, and the caller is told by
ModuleNotFoundError. Weights are random, pictures small.
"""

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

from propagation.architectures import Experts, MobileNetV2, ResNet, UNet

TIMM = {
    # name in timm: (size of the picture, arguments)
    "resnet18": (64, {}), "resnet26d": (64, {}), "resnext26ts": (64, {}), "seresnet18": (64, {}),
    "ecaresnet26t": (64, {}), "res2net50_26w_4s": (64, {}), "skresnet18": (64, {}), "resnest14d": (64, {}),
    "resnetv2_50": (64, {}), "resnetv2_50x1_bit": (64, {}), "nf_resnet26": (64, {}), "nfnet_l0": (64, {}),
    "densenet121": (64, {}), "dla34": (64, {}), "dpn48b": (64, {}), "hrnet_w18_small": (64, {}),
    "vgg11_bn": (64, {}), "repvgg_a0": (64, {}), "mobileone_s0": (64, {}), "regnetx_002": (64, {}),
    "regnety_002": (64, {}), "cspresnet50": (64, {}), "ese_vovnet19b_dw": (64, {}), "selecsls42": (64, {}),
    "inception_v3": (96, {}), "xception41": (64, {}), "efficientnet_lite0": (64, {}), "efficientnetv2_rw_t": (64, {}),
    "mobilenetv3_small_050": (64, {}), "mobilenetv4_conv_small_035": (64, {}), "mnasnet_small": (64, {}),
    "lcnet_035": (64, {}), "tinynet_e": (64, {}), "ghostnet_050": (64, {}), "rexnetr_100": (64, {}),
    "hardcorenas_a": (64, {}), "convnext_atto": (64, {}), "convnextv2_atto": (64, {}), "edgenext_xx_small": (64, {}),
    "mobilevit_xxs": (64, {}), "fastvit_t8": (64, {}), "repvit_m0_9": (64, {}), "poolformer_s12": (64, {}),
    "visformer_tiny": (64, {"img_size": 64}), "coatnet_pico_rw_224": (64, {"img_size": 64}),
    "maxvit_rmlp_pico_rw_256": (64, {"img_size": 64}), "vit_tiny_patch16_224": (32, {"img_size": 32}),
    "deit_tiny_distilled_patch16_224": (32, {"img_size": 32}), "cait_xxs24_224": (32, {"img_size": 32}),
    "xcit_nano_12_p16_224": (32, {}), "crossvit_tiny_240": (240, {}), "convit_tiny": (32, {"img_size": 32}),
    "pit_ti_224": (224, {}), "tnt_s_legacy_patch16_224": (224, {}), "twins_pcpvt_small": (64, {"img_size": 64}),
    "swin_tiny_patch4_window7_224": (56, {"img_size": 56}), "mixer_s32_224": (64, {"img_size": 64}),
    "gmlp_ti16_224": (32, {"img_size": 32}), "resmlp_12_224": (32, {"img_size": 32}),
    "sequencer2d_s": (32, {"img_size": 32}), "levit_128s": (224, {}), "efficientformer_l1": (224, {}),
    "mvitv2_tiny": (64, {"img_size": 64}), "davit_tiny": (64, {}), "volo_d1_224": (64, {"img_size": 64}),
    "focalnet_tiny_srf": (64, {}), "starnet_s1": (64, {}), "inception_next_tiny": (64, {}),
}  # fmt: skip

TORCHVISION = {
    "alexnet": (64, {}), "googlenet": (64, {"init_weights": False, "aux_logits": False}),
    "shufflenet_v2_x0_5": (64, {}), "squeezenet1_1": (64, {}),
    "segmentation.lraspp_mobilenet_v3_large": (64, {"weights_backbone": None}),
    "segmentation.fcn_resnet50": (64, {"weights_backbone": None}),
    "segmentation.deeplabv3_mobilenet_v3_large": (64, {"weights_backbone": None}),
}  # fmt: skip


class Tagger(nn.Module):
    """A tagger of text: an embedding, a recurrent network in both directions, a linear layer."""

    def __init__(self, kind):
        super().__init__()
        self.table = nn.Embedding(50, 16)
        self.body = getattr(nn, kind)(16, 12, num_layers=2, bidirectional=True, batch_first=True)
        self.out = nn.Linear(24, 5)

    def forward(self, ids):
        return self.out(self.body(self.table(ids))[0])


class Spectral(nn.Module):
    """A layer of a Fourier operator: a transform, a product of complex weights, and back."""

    def __init__(self, width=8, modes=4):
        super().__init__()
        self.lift, self.drop = nn.Linear(2, width), nn.Linear(width, 1)
        self.weight = nn.Parameter(torch.randn(width, width, modes, dtype=torch.cfloat) / width)
        self.beside = nn.Conv1d(width, width, 1)
        self.modes = modes

    def forward(self, x):
        y = self.lift(x).transpose(1, 2)
        found = torch.fft.rfft(y)
        mixed = torch.einsum("bim,iom->bom", found[..., : self.modes], self.weight)
        filled = functional.pad(torch.view_as_real(mixed), (0, 0, 0, found.shape[-1] - self.modes))
        back = torch.fft.irfft(torch.view_as_complex(filled), n=y.shape[-1])
        return self.drop(functional.gelu(back + self.beside(y)).transpose(1, 2))


class Standardized(nn.Conv2d):
    """A convolution whose weights are standardised, as NF-ResNets do it, by a batch norm of the weight."""

    def forward(self, x):
        flat = self.weight.reshape(1, self.out_channels, -1)
        weight = functional.batch_norm(flat, None, None, training=True, momentum=0.0, eps=1e-6)
        return functional.conv2d(x, weight.reshape_as(self.weight), self.bias, self.stride, self.padding)


class Global(nn.Module):
    """ConvNeXt-V2's response normalisation between two linear layers."""

    def __init__(self, width=8, hidden=32):
        super().__init__()
        self.first, self.second = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.gamma, self.beta = nn.Parameter(torch.randn(hidden)), nn.Parameter(torch.randn(hidden))

    def forward(self, x):
        y = functional.gelu(self.first(x))
        size = torch.linalg.vector_norm(y, dim=(1, 2), keepdim=True)
        return x + self.second(y + self.gamma * (y * size / (size.mean(-1, keepdim=True) + 1e-6)) + self.beta)


class Pointcloud(nn.Module):
    """PointNet: one network for every point, the largest of each feature, a classifier."""

    def __init__(self):
        super().__init__()
        widths = [3, 16, 32, 64]
        self.points = nn.Sequential(
            *(m for a, b in pairwise(widths) for m in (nn.Conv1d(a, b, 1), nn.BatchNorm1d(b), nn.ReLU()))
        )
        self.head = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x):
        return self.head(self.points(x).amax(-1))


class Cross(nn.Module):
    """A recommender: embeddings, a cross network and a deep one side by side."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(20, 8) for _ in range(3))
        self.cross = nn.ModuleList(nn.Linear(24, 24) for _ in range(2))
        self.deep = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
        self.out = nn.Linear(40, 1)

    def forward(self, ids):
        x = torch.cat([table(ids[:, i]) for i, table in enumerate(self.tables)], -1)
        y = x
        for layer in self.cross:
            y = x * layer(y) + y
        return self.out(torch.cat([y, self.deep(x)], -1)).sigmoid()


def _encoder():
    layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), (torch.randn(2, 7, 32),)


def _transformer():
    model = nn.Transformer(32, 4, 1, 1, 48, batch_first=True)
    return model, (torch.randn(2, 7, 32), torch.randn(2, 5, 32))


def _images(*layers):
    return nn.Sequential(*layers), (torch.randn(2, 3, 16, 16),)


WRITTEN = {
    "resnet 18": lambda: (ResNet((2, 2, 2, 2), basic=True, width=8), (torch.randn(2, 3, 48, 48),)),
    "resnet 50": lambda: (ResNet((3, 4, 6, 3), basic=False, width=4), (torch.randn(2, 3, 48, 48),)),
    "mobilenet v2": lambda: (MobileNetV2(0.25), (torch.randn(2, 3, 48, 48),)),
    "unet": lambda: (UNet(), (torch.randn(2, 2, 16, 16),)),
    "mixture of experts": lambda: (Experts(), (torch.randn(2, 5, 16),)),
    "lstm tagger": lambda: (Tagger("LSTM"), (torch.randint(0, 50, (2, 7)),)),
    "gru tagger": lambda: (Tagger("GRU"), (torch.randint(0, 50, (2, 7)),)),
    "rnn tagger": lambda: (Tagger("RNN"), (torch.randint(0, 50, (2, 7)),)),
    "fourier operator": lambda: (Spectral(), (torch.randn(2, 16, 2),)),
    "weight standardisation": lambda: _images(
        Standardized(3, 16, 3), nn.GroupNorm(4, 16), nn.ReLU(), Standardized(16, 16, 3), nn.ReLU(), nn.Conv2d(16, 4, 1)
    ),
    "global response norm": lambda: (Global(), (torch.randn(2, 5, 5, 8),)),
    "pointnet": lambda: (Pointcloud(), (torch.randn(2, 3, 20),)),
    "deep and cross": lambda: (Cross(), (torch.randint(0, 20, (4, 3)),)),
    "transformer encoder": _encoder,
    "transformer": _transformer,
    "convolutions in 3d": lambda: (
        nn.Sequential(nn.Conv3d(2, 8, 3), nn.BatchNorm3d(8), nn.ReLU(), nn.Conv3d(8, 4, 1), nn.AdaptiveAvgPool3d(1)),
        (torch.randn(2, 2, 6, 6, 6),),
    ),
    "autoencoder": lambda: _images(
        *(nn.Conv2d(3, 8, 4, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 4, 2, 1), nn.ReLU()),
        *(nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(8, 3, 4, 2, 1), nn.Tanh()),
    ),
    "pixel shuffle": lambda: _images(
        nn.Conv2d(3, 16, 3, padding=1), nn.PReLU(16), nn.Conv2d(16, 12, 3, padding=1), nn.PixelShuffle(2)
    ),
    "depthwise and dilated": lambda: _images(
        nn.Conv2d(3, 16, 1), nn.Conv2d(16, 16, 3, groups=16, dilation=2), nn.Hardswish(), nn.Conv2d(16, 4, 1)
    ),
}


def build(source, name):
    """Return a model in eval mode and positional inputs for it."""
    torch.manual_seed(0)
    if source == "written":
        model, inputs = WRITTEN[name]()
        return model.eval(), inputs
    size, arguments = (TIMM if source == "timm" else TORCHVISION)[name]
    if source == "timm":
        import timm

        return timm.create_model(name, **arguments).eval(), (torch.randn(2, 3, size, size),)
    import torchvision

    part, _, last = name.rpartition(".")
    where = getattr(torchvision.models, part) if part else torchvision.models
    return getattr(where, last)(weights=None, **arguments).eval(), (torch.randn(2, 3, size, size),)
