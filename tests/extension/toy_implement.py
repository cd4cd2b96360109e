"""An implement of one's own for linear layers: the product of the live columns alone, by an index."""

import torch
from torch import nn

import sparta
from sparta.specialize.implement import Implement, Support, register
from sparta.specialize.linear.spec import LinearKernel, apply_epilogue


class ColumnsKernel(LinearKernel):
    def __init__(self, spec):
        self.epilogue = spec.epilogue

    def pack(self, operand):
        live = operand.ne(0).any(0).nonzero().flatten()
        return live, operand[:, live].contiguous()

    def run(self, packed, *inputs):
        x, bias, residual = inputs
        live, weight = packed
        return apply_epilogue(nn.functional.linear(x[:, live], weight, bias), self.epilogue, residual)


@register
class LiveColumns(Implement):
    """Multiplies with the columns that have a live weight."""

    op, name = "linear", "toy-columns"

    def supports(self, spec):
        return Support.yes() if spec.device == "cpu" else Support.no(f"made for the CPU, not on {spec.device}")

    def build(self, spec, params):
        del params
        return ColumnsKernel(spec)


def main():
    mask = torch.ones(8, 16, dtype=torch.bool)
    mask[:, 4:] = False
    layer, x = nn.Linear(16, 8), torch.randn(5, 16)
    sparse = sparta.nn.SparseLinear(layer, weight_mask=mask).eval()
    sparse.build({"_name": "toy-columns"}, (x,))
    with torch.no_grad():
        torch.testing.assert_close(sparse(x), nn.functional.linear(x, layer.weight * mask, layer.bias))
