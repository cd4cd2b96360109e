"""Random models for the property tests, and an interpreter that puts propagated facts to the test."""

import torch
from hypothesis import strategies as st
from torch import fx, nn
from torch.nn import functional

UNARY = [
    torch.relu,
    torch.sigmoid,
    torch.tanh,
    functional.gelu,
    functional.hardswish,
    torch.exp,
    torch.neg,
    functional.silu,
]


class RandomModel(nn.Module):
    """A chain of steps over a pool of tensors; every step reads tensors of the pool and adds one."""

    def __init__(self, steps, *, images, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.images, self.steps = images, []
        self.layers = nn.ModuleList()
        widths = [4]
        for kind, first, second, width in steps:
            a, b = first % len(widths), second % len(widths)
            layer, out = self._layer(kind, widths[a], widths[b], width, generator)
            if out is None:
                continue
            self.layers.append(layer)
            self.steps.append((kind, a, b, width))
            widths.append(out)
        self.flat = images and seed % 3 == 0
        self.last = nn.Linear(widths[-1] * (9 if self.flat else 1), 3)
        randomise(self, generator)

    def _layer(self, kind, a, b, width, generator):
        conv = nn.Conv2d if self.images else nn.Conv1d
        layer, out = nn.Identity(), a
        match kind:
            case "linear" if self.images:
                layer, out = conv(a, width, 1), width
            case "linear":
                layer, out = nn.Linear(a, width, bias=width % 2 == 0), width
            case "conv" if self.images:
                layer, out = conv(a, width, 3, padding=width % 2, bias=width % 3 > 0), width
            case "depthwise" if self.images:
                layer = conv(a, a, 3, padding=1, groups=a)
            case "grouped" if self.images and a % 2 == 0:
                layer, out = conv(a, 2 * width, 1, groups=2), 2 * width
            case "norm":
                layer = nn.BatchNorm2d(a) if self.images else nn.BatchNorm1d(a)
            case "layernorm" if not self.images:
                layer = nn.LayerNorm(a)
            case "add" | "mul" | "shuffle" if a % 2 if kind == "shuffle" else a != b:
                out = None
            case "cat":
                out = a + b
            case "half" if a > 1:
                out = a // 2
            case "conv" | "depthwise" | "grouped" | "layernorm" | "half" | "pool":
                out = a if kind == "pool" and self.images else None
        return layer, out

    def forward(self, x):
        pool = [x]
        for layer, (kind, a, b, width) in zip(self.layers, self.steps, strict=True):
            one, two = pool[a], pool[b]
            if self.images and kind in {"add", "mul", "cat"}:
                size = min(one.shape[-1], two.shape[-1])
                one, two = one[..., :size, :size], two[..., :size, :size]
            match kind:
                case "act":
                    new = UNARY[width % len(UNARY)](one)
                case "add":
                    new = one + two
                case "mul":
                    new = one * torch.sigmoid(two) if width % 2 else one * two
                case "cat":
                    new = torch.cat([one, two], 1)
                case "half":
                    new = torch.split(one, [one.shape[1] // 2, one.shape[1] - one.shape[1] // 2], 1)[0]
                case "shuffle":
                    halves = one.unflatten(1, (2, one.shape[1] // 2)).transpose(1, 2)
                    new = halves.flatten(1, 2) if width % 2 else halves.reshape(one.shape)
                case "pool":
                    new = functional.max_pool2d(one, 3, 1, 1) if width % 2 else functional.avg_pool2d(one, 3, 1, 1)
                case "conv":
                    new = layer(functional.pad(one, (1, 1, 1, 1)))
                case _:
                    new = layer(one)
            pool.append(new)
        final = pool[-1]
        if self.flat:
            return self.last(functional.adaptive_avg_pool2d(final, 3).flatten(1))
        return self.last(final.mean((2, 3)) if self.images else final)


def randomise(model, generator):
    """Give a model values without a pattern, then zero rows, columns and single elements of its weights."""

    def rand(*shape):
        return torch.rand(*shape, generator=generator)

    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if buffer.is_floating_point():
                buffer.copy_(rand(buffer.shape) + 0.5 if "var" in name else rand(buffer.shape) - 0.5)
        for parameter in model.parameters():
            parameter.copy_(rand(parameter.shape) * 2 - 1)
            if parameter.dim() < 2:
                parameter[rand(parameter.shape) < 0.2] = 0
                continue
            parameter[rand(parameter.shape[0]) < 0.3] = 0
            parameter[:, rand(parameter.shape[1]) < 0.3] = 0
            parameter[rand(parameter.shape) < 0.1] = 0


@st.composite
def random_models(draw, *, images):
    """A model and an example input for it."""
    kinds = ["linear", "act", "add", "mul", "cat", "norm", "half", "linear", "layernorm", "shuffle"]
    kinds += ["conv", "depthwise", "grouped", "pool"] if images else []
    step = st.tuples(st.sampled_from(kinds), st.integers(0, 9), st.integers(0, 9), st.integers(1, 6))
    steps = draw(st.lists(step, min_size=1, max_size=9))
    seed = draw(st.integers(0, 10_000))
    model = RandomModel(steps, images=images, seed=seed).double().eval()
    return model, torch.randn((2, 4, 5, 5) if images else (3, 4), dtype=torch.float64)


class Witness(fx.Interpreter):
    """Runs a captured model; checks every claimed constant and overwrites every claimed dead element."""

    def __init__(self, result, masked, *, scramble):
        super().__init__(result.captured.module)
        self.facts, self.masked, self.scramble = result.facts, masked, scramble
        self.checked = 0

    def run_node(self, node):
        value = super().run_node(node)
        if node.op == "get_attr" and str(node.target) in self.masked:
            value = self.masked[str(node.target)]
        if not isinstance(value, torch.Tensor) or node not in self.facts.observed or value.is_complex():
            return value
        tesa = self.facts.tesa(node)
        states = tesa.states()
        if node.op == "call_function" and not self.scramble:
            constants = states == 1
            self.checked += int(constants.sum())
            claimed = tesa.values()[constants]
            torch.testing.assert_close(value[constants].double(), claimed, rtol=1e-6, atol=1e-9, equal_nan=True)
        if self.scramble and value.is_floating_point() and node.op != "placeholder":
            value = torch.where(states == 2, torch.randn_like(value) * 3, value)
        return value
