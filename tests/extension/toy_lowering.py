"""A lowering of one's own: calls of one's own op become linear layers of the compiler."""

import torch
from torch import Tensor, nn

import sparta
from sparta.compiler.lower import Anchor, register_lowering
from sparta.compiler.lower.linear import LinearLowering


@torch.library.custom_op("toy::project", mutates_args=())
def project(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.t()


@project.register_fake
def _(x, weight):
    return x.new_empty(*x.shape[:-1], weight.shape[0])


class ProjectLowering(LinearLowering):
    """Takes `toy::project`; all else is as in a linear layer."""

    def match(self, node):
        if node.target is not torch.ops.toy.project.default:
            return super().match(node)
        x, weight = node.args
        return Anchor(x, weight.target, None)


register_lowering(ProjectLowering())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 64))

    def forward(self, x):
        return project(x, self.weight).relu()


def main():
    model, x = Net().eval(), torch.randn(16, 64)
    spec = sparta.Spec({"weight": sparta.TeSA.from_pattern(sparta.Block(4, 1), model.weight.detach().abs(), 0.9)})
    spec.apply(model)
    fast = sparta.compile(model, (x,), spec, tune="off")
    assert [layer.op for layer in fast.report.plan.layers] == ["linear"]
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)
