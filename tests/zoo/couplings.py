"""Small networks, each with one way in which channels of several layers hang together.

They are the shapes that pruners of channels are tested with (Torch-Pruning's tests among them): concatenation, splits,
groups, shuffles, gates, parameters outside of layers, layers that are called twice, several inputs and outputs.
"""

import torch
from torch import nn
from torch.nn import functional


class Net(nn.Module):
    """Layers by name, and a function of them and the inputs."""

    def __init__(self, run, **layers):
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.run = run

    def forward(self, *inputs):
        return self.run(self, *inputs)


def _conv(inputs, outputs, size=3, **options):
    return nn.Conv2d(inputs, outputs, size, padding=size // 2, **options)


def _image(*channels):
    return tuple(torch.randn(2, count, 12, 12) for count in channels)


def concat():
    def run(net, x):
        return net.out(torch.cat([net.a(x).relu(), net.b(x).relu(), x], 1))

    return Net(run, a=_conv(3, 8), b=_conv(3, 12), out=_conv(23, 4)), _image(3)


def split():
    def run(net, x):
        one, two, three = net.both(x).split([4, 6, 6], 1)
        return net.a(one.relu()), net.b(two * three.sigmoid())

    return Net(run, both=_conv(3, 16), a=_conv(4, 5), b=_conv(6, 5)), _image(3)


def concat_and_split():
    def run(net, x):
        one, two = torch.cat([net.a(x), net.b(x)], 1).relu().chunk(2, 1)
        return net.out(one + two)

    return Net(run, a=_conv(3, 6), b=_conv(3, 10), out=_conv(8, 4)), _image(3)


def flatten_with_space():
    def run(net, x):
        return net.out(functional.max_pool2d(net.a(x).relu(), 3).flatten(1))

    return Net(run, a=_conv(3, 8), out=nn.Linear(8 * 16, 5)), _image(3)


def groups():
    def run(net, x):
        return net.out(net.norm(net.grouped(net.a(x).relu())).relu())

    return Net(run, a=_conv(3, 16), grouped=_conv(16, 24, groups=4), norm=nn.GroupNorm(6, 24), out=_conv(24, 4)), (
        _image(3)
    )


def channel_shuffle():
    def run(net, x):
        one, two = net.a(x).chunk(2, 1)
        y = torch.cat([one, net.depthwise(two)], 1)
        y = y.view(-1, 2, 8, *y.shape[2:]).transpose(1, 2).flatten(1, 2)
        return net.out(y)

    return Net(run, a=_conv(3, 16), depthwise=_conv(8, 8, groups=8), out=_conv(16, 4)), _image(3)


def squeeze_and_excite():
    def run(net, x):
        y = net.a(x).relu()
        return net.out(y * net.up(net.down(y.mean((2, 3), keepdim=True)).relu()).sigmoid())

    return Net(run, a=_conv(3, 16), down=_conv(16, 4, 1), up=_conv(4, 16, 1), out=_conv(16, 4)), _image(3)


def residual_chain():
    def run(net, x):
        x = net.stem(x)
        for a, b in zip(net.a, net.b, strict=True):
            x = x + b(a(x).relu())
        return net.out(x.relu())

    layers = {"a": nn.ModuleList(_conv(8, 12) for _ in range(3)), "b": nn.ModuleList(_conv(12, 8) for _ in range(3))}
    return Net(run, stem=_conv(3, 8), out=_conv(8, 4), **layers), _image(3)


def dense_block():
    def run(net, x):
        found = [net.stem(x)]
        for layer in net.layers:
            found.append(layer(torch.cat(found, 1)))
        return net.out(torch.cat(found, 1))

    layers = nn.ModuleList(
        nn.Sequential(nn.BatchNorm2d(8 + 4 * i), nn.ReLU(), _conv(8 + 4 * i, 4, bias=False)) for i in range(3)
    )
    return Net(run, stem=_conv(3, 8), layers=layers, out=_conv(20, 4)), _image(3)


def inception_branches():
    def run(net, x):
        pooled = functional.avg_pool2d(x, 3, 1, 1)
        return net.out(torch.cat([net.one(x), net.three(net.before(x).relu()), net.pool(pooled)], 1).relu())

    layers = {"one": _conv(3, 6, 1), "before": _conv(3, 4, 1), "three": _conv(4, 8), "pool": _conv(3, 4, 1)}
    return Net(run, out=_conv(18, 5), **layers), _image(3)


def feature_pyramid():
    def run(net, x):
        low = net.low(x).relu()
        high = net.high(low).relu()
        top = net.side(high)
        return [top, net.lateral(low) + functional.interpolate(top, scale_factor=2.0)]

    return Net(run, low=_conv(3, 8), high=_conv(8, 16, stride=2), side=_conv(16, 6, 1), lateral=_conv(8, 6, 1)), (
        _image(3)
    )


def parameters_of_their_own():
    def run(net, x):
        y = net.a(x).flatten(2).transpose(1, 2) + net.places
        return net.out(net.norm(y) * net.scale)

    parameters = {"places": nn.Parameter(torch.randn(1, 144, 16)), "scale": nn.Parameter(torch.rand(16))}
    return Net(run, a=_conv(3, 16), norm=nn.LayerNorm(16), out=nn.Linear(16, 4), **parameters), _image(3)


def layer_called_twice():
    def run(net, x):
        return net.out(net.shared(net.shared(net.a(x).relu()).relu()))

    return Net(run, a=nn.Linear(6, 12), shared=nn.Linear(12, 12), out=nn.Linear(12, 3)), (torch.randn(2, 6),)


def inputs_and_outputs():
    def run(net, x, y):
        both = torch.cat([net.a(x).relu(), net.b(y).tanh()], -1)
        return {"sum": net.out(both), "parts": (net.c(both), both.amax(-1))}

    layers = {"a": nn.Linear(6, 8), "b": nn.Linear(5, 10), "c": nn.Linear(18, 2), "out": nn.Linear(18, 3)}
    return Net(run, **layers), (torch.randn(2, 6), torch.randn(2, 5))


def heads_by_reshaping():
    def run(net, x):
        b, t, w = x.shape
        q, k, v = net.qkv(x).view(b, t, 3, 4, w // 4).permute(2, 0, 3, 1, 4)
        y = (q @ k.transpose(-2, -1) / 2).softmax(-1) @ v
        return x + net.out(y.transpose(1, 2).reshape(b, t, w))

    return Net(run, qkv=nn.Linear(16, 48), out=nn.Linear(16, 16)), (torch.randn(2, 5, 16),)


def gated_units():
    def run(net, x):
        gate, value = net.up(x).chunk(2, -1)
        return net.down(functional.silu(gate) * value) + functional.glu(net.other(x))

    return Net(run, up=nn.Linear(8, 48), down=nn.Linear(24, 8), other=nn.Linear(8, 16)), (torch.randn(2, 5, 8),)


def tied_embedding():
    def run(net, ids):
        return functional.linear(net.body(net.table(ids)).relu(), net.table.weight)

    return Net(run, table=nn.Embedding(30, 12), body=nn.Linear(12, 12)), (torch.randint(0, 30, (2, 6)),)


def convolutions_then_lstm():
    def run(net, x):
        return net.out(net.rnn(net.a(x).relu().transpose(1, 2))[0][:, -1])

    layers = {"a": nn.Conv1d(4, 12, 3, padding=1), "rnn": nn.LSTM(12, 10, batch_first=True), "out": nn.Linear(10, 3)}
    return Net(run, **layers), (torch.randn(2, 4, 9),)


def bilinear_and_product():
    def run(net, x, y):
        outer = torch.einsum("bi,bj->bij", net.a(x), net.b(y)).flatten(1)
        return net.pair(net.a(x), net.b(y)) + net.out(outer)

    layers = {"a": nn.Linear(5, 6), "b": nn.Linear(4, 7), "pair": nn.Bilinear(6, 7, 3), "out": nn.Linear(42, 3)}
    return Net(run, **layers), (torch.randn(2, 5), torch.randn(2, 4))


def norms_of_many_kinds():
    layers = [_conv(3, 12), nn.InstanceNorm2d(12, affine=True), nn.PReLU(12), _conv(12, 12), nn.LocalResponseNorm(3)]
    layers += [nn.ELU(), _conv(12, 8), nn.BatchNorm2d(8), nn.Softplus(), nn.AdaptiveMaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(32, 4)), _image(3)


COUPLINGS = {
    "concat": concat,
    "split": split,
    "concat and split": concat_and_split,
    "flatten with space": flatten_with_space,
    "groups": groups,
    "channel shuffle": channel_shuffle,
    "squeeze and excite": squeeze_and_excite,
    "residual chain": residual_chain,
    "dense block": dense_block,
    "inception branches": inception_branches,
    "feature pyramid": feature_pyramid,
    "parameters of their own": parameters_of_their_own,
    "layer called twice": layer_called_twice,
    "inputs and outputs": inputs_and_outputs,
    "heads by reshaping": heads_by_reshaping,
    "gated units": gated_units,
    "tied embedding": tied_embedding,
    "convolutions then lstm": convolutions_then_lstm,
    "bilinear and product": bilinear_and_product,
    "norms of many kinds": norms_of_many_kinds,
}


def build(name):
    """Return a model in eval mode and positional inputs for it."""
    torch.manual_seed(0)
    model, inputs = COUPLINGS[name]()
    return model.eval(), inputs
