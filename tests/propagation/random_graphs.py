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
        randomize(self, generator)

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
            case "norm" | "layernorm" | "groupnorm" if kind != "layernorm" or not self.images:
                layer = self._norm(kind, a, width)
            case "add" | "mul" | "shuffle" if a % 2 if kind == "shuffle" else a != b:
                out = None
            case "cat":
                out = a + b
            case "half" if a > 1:
                out = a // 2
            case "conv" | "depthwise" | "grouped" | "layernorm" | "half" | "pool":
                out = a if kind == "pool" and self.images else None
        return layer, out

    def _norm(self, kind, a, width):
        if kind == "groupnorm":
            return nn.GroupNorm(next(groups for groups in (width % 5 + 1, 2, 1) if a % groups == 0), a)
        if kind == "layernorm":
            return nn.LayerNorm(a)
        return nn.BatchNorm2d(a) if self.images else nn.BatchNorm1d(a)

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


class RandomSequence(nn.Module):
    """The same over sequences ``(batch, length, width)``: attention, gating, rotations, norms, picks."""

    KINDS = ("linear", "act", "add", "gate", "cat", "attention", "fused", "layernorm", "rmsnorm", "flip", "pick")
    KINDS += ("roll", "stride", "softmax", "shared", "mean", "sort", "weightnorm", "linear")
    KINDS += ("running", "length", "fourier", "complex", "einsum", "table", "LSTM", "GRU", "RNN")

    def __init__(self, steps, *, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.layers, self.steps = nn.ModuleList(), []
        widths = [4]
        for kind, first, second, size in steps:
            a, b = first % len(widths), second % len(widths)
            layer, out = self._layer(kind, widths[a], widths[b], size)
            if out is not None:
                self.layers.append(layer)
                self.steps.append((kind, a, b, size))
                widths.append(out)
        self.last = nn.Linear(widths[-1], 3)
        randomize(self, generator)

    @staticmethod
    def _layer(kind, a, b, size):
        """Return a step's module and the width of what it gives; None where it does not fit."""
        made = {
            "linear": lambda: (nn.Linear(a, size, bias=size % 2 == 0), size),
            "weightnorm": lambda: (nn.utils.parametrizations.weight_norm(nn.Linear(a, size)), size),
            "gate": lambda: (nn.Linear(a, 2 * size), size),
            "attention": lambda: (_linears(a, [2 * size] * 3, bias=size % 2 == 0), 2 * size),
            # Two heads of keys and values for four of queries.
            "shared": lambda: (_linears(a, [4 * size, 2 * size, 2 * size], bias=False), 4 * size),
            "fused": lambda: (nn.Linear(a, 6 * size), 2 * size),
            "layernorm": lambda: (nn.LayerNorm(a), a),
            "rmsnorm": lambda: (nn.RMSNorm(a), a),
            "pick": lambda: (_Order(a, size), a // 2 + 1),
            "stride": lambda: (nn.Identity(), (a + 1) // 2),
            "table": lambda: (_Table(a, size), a),
            **dict.fromkeys(("LSTM", "GRU", "RNN"), lambda: _recurrent(kind, a, size)),
            "cat": lambda: (nn.Identity(), a + b),
            "add": lambda: (nn.Identity(), a if a == b else None),
        }
        return made.get(kind, lambda: (nn.Identity(), a))()

    def forward(self, x):
        pool = [x]
        for layer, (kind, a, b, size) in zip(self.layers, self.steps, strict=True):
            function = _SEQUENCE.get(kind)
            pool.append(layer(pool[a]) if function is None else function(layer, pool[a], pool[b], size))
        return self.last(pool[-1])


class _Order(nn.Module):
    """A fixed choice of channels."""

    def __init__(self, width, seed):
        super().__init__()
        order = torch.randperm(width, generator=torch.Generator().manual_seed(seed))
        self.register_buffer("order", order[: width // 2 + 1])


class _Table(nn.Module):
    """Numbers that differ from position to position, some of them 0, go through a linear layer and are added."""

    def __init__(self, width, size):
        super().__init__()
        self.layer = nn.Linear(size, width)
        if size % 2:
            self.register_buffer("table", torch.zeros(5, size))
        else:
            self.table = nn.Parameter(torch.zeros(5, size))


def _recurrent(kind, inputs, size):
    """Return a recurrent network of one or two layers, in one direction or both, and the width of what it gives."""
    both = size % 3 == 0
    made = getattr(nn, kind)(inputs, size, 1 + size % 2, bias=size > 4, bidirectional=both, batch_first=True)
    return made, 2 * size if both else size


def _complex(_, x, __, size):
    if x.shape[-1] % 2:
        return x
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * (1 + 1j * size)
    return torch.view_as_real(pairs).flatten(-2)


def _linears(inputs, outputs, *, bias):
    return nn.ModuleList(nn.Linear(inputs, out, bias=bias) for out in outputs)


def _gate(layer, x, _, __):
    first, second = layer(x).chunk(2, -1)
    return functional.silu(first) * second


def _pick(layer, x, _, size):
    return x[:, :, layer.order] if size % 2 else x.index_select(2, layer.order)


_SEQUENCE = {
    "act": lambda _, x, __, size: UNARY[size % len(UNARY)](x),
    "add": lambda _, x, y, __: x + y,
    "cat": lambda _, x, y, __: torch.cat([x, y], -1),
    "gate": _gate,
    "attention": lambda layer, x, _, size: attend(layer, x, size, kind="attention"),
    "shared": lambda layer, x, _, size: attend(layer, x, size, kind="shared"),
    "fused": lambda layer, x, _, size: attend(layer, x, size, kind="fused"),
    "flip": lambda _, x, __, ___: x.flip(-1),
    "roll": lambda _, x, __, ___: x.roll(1, -1),
    "stride": lambda _, x, __, ___: x[..., ::2],
    "pick": _pick,
    "softmax": lambda _, x, __, ___: x.softmax(1),
    "mean": lambda _, x, __, size: x - x.mean(-1 if size % 2 else 1, keepdim=True),
    "sort": lambda _, x, __, ___: x.sort(1)[0],
    "running": lambda _, x, __, size: x.cumsum(1 if size % 2 else -1),
    "length": lambda _, x, __, size: x * torch.linalg.vector_norm(x, dim=(1,) if size % 2 else (1, 2), keepdim=True),
    "fourier": lambda _, x, __, size: torch.fft.fft(x, dim=1).real + torch.fft.rfft(x, n=8, dim=1).imag[:, :1] * size,
    "complex": _complex,
    "einsum": lambda _, x, __, ___: x * torch.einsum("btc,btc->b", x, x.sigmoid())[:, None, None],
    "table": lambda layer, x, _, __: x + layer.layer(layer.table),
    **dict.fromkeys(("LSTM", "GRU", "RNN"), lambda layer, x, _, __: layer(x)[0]),
}


def attend(layer, x, size, *, kind):
    """Attention with two heads (queries: four where keys are shared), fused or written out."""
    parts = layer(x).split(2 * size, -1) if kind == "fused" else [part(x) for part in layer]
    q, k, v = (part.unflatten(-1, (-1, size)).transpose(1, 2) for part in parts)
    if kind == "shared":
        k, v = (
            t.repeat_interleave(2, 1) if size % 2 else t[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2)
            for t in (k, v)
        )
    if size % 2:
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=size % 3 == 0)
    else:
        y = (q @ k.transpose(-1, -2) / size**0.5).softmax(-1) @ v
    return y.transpose(1, 2).flatten(2)


def randomize(model, generator):
    """Give a model values without a pattern, then zero rows, columns and single elements of its weights."""

    def rand(*shape):
        return torch.rand(*shape, generator=generator)

    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if buffer.is_floating_point():
                buffer.copy_(rand(buffer.shape) + 0.5 if "var" in name else rand(buffer.shape) - 0.5)
                if name.endswith("table"):
                    buffer[rand(buffer.shape) < 0.3] = 0
        for name, parameter in model.named_parameters():
            parameter.copy_(rand(parameter.shape) * 2 - 1)
            if parameter.dim() < 2:
                parameter[rand(parameter.shape) < 0.2] = 0
                continue
            parameter[rand(parameter.shape[0]) < 0.3] = 0
            parameter[:, rand(parameter.shape[1]) < 0.3] = 0
            parameter[rand(parameter.shape) < 0.1] = 0
            if name.endswith("original1"):  # the direction of a normed weight must not be zero
                parameter[(parameter == 0).all(1)] = 1


@st.composite
def random_models(draw, *, images):
    """A model and an example input for it."""
    kinds = ["linear", "act", "add", "mul", "cat", "norm", "groupnorm", "half", "linear", "layernorm", "shuffle"]
    kinds += ["conv", "depthwise", "grouped", "pool"] if images else []
    step = st.tuples(st.sampled_from(kinds), st.integers(0, 9), st.integers(0, 9), st.integers(1, 6))
    steps = draw(st.lists(step, min_size=1, max_size=9))
    seed = draw(st.integers(0, 10_000))
    model = RandomModel(steps, images=images, seed=seed).double().eval()
    return model, torch.randn((2, 4, 5, 5) if images else (3, 4), dtype=torch.float64)


@st.composite
def random_sequences(draw):
    """A model over sequences and an example input for it."""
    step = st.tuples(st.sampled_from(RandomSequence.KINDS), st.integers(0, 9), st.integers(0, 9), st.integers(1, 6))
    steps = draw(st.lists(step, min_size=1, max_size=8))
    model = RandomSequence(steps, seed=draw(st.integers(0, 10_000))).double().eval()
    return model, torch.randn(2, 5, 4, dtype=torch.float64)


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
