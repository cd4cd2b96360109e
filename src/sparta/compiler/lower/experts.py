"""Mixtures of experts: a :class:`sparta.nn.DynamicSparseMoE` in a model stays one call, with its own kernel.

While a model is captured, such modules call one op instead of what their kernel is made of; the op's kernel is then
chosen by measurement. A loop over experts in plain PyTorch is not recognised; its layers are linear layers like others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain

import torch
from torch import Tensor, fx, nn

from sparta.compiler.graph.program import Program
from sparta.compiler.lower.call import Call
from sparta.compiler.run.ops import config_text
from sparta.measure.references import moe_reference
from sparta.nn.moe import DynamicSparseMoE
from sparta.specialize.moe.spec import moe_spec
from sparta.specialize.tuning.select import DENSE, Problem
from sparta.tesa.attribute import TeSA

__all__ = ["find_experts", "opaque_experts"]

_TARGET = torch.ops.sparta.experts.default


@contextmanager
def opaque_experts(model: nn.Module) -> Iterator[None]:
    """Let the mixtures of experts in a model be one op each while it is captured."""
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, DynamicSparseMoE):
                stack.enter_context(module.run_by(partial(_as_op, module)))
        yield


def _as_op(module: DynamicSparseMoE, *inputs: Tensor | None) -> Tensor:
    tokens, ids, gates, *parameters = inputs
    config = {"_name": DENSE} if module.choice is None else module.choice.config
    result: Tensor = _TARGET(tokens, ids, gates, parameters[::2], parameters[1::2], config_text(config))
    return result


def find_experts(node: fx.Node, program: Program, shapes: dict[fx.Node, Tensor]) -> Call | str | None:
    """Return how to measure a mixture of experts."""
    if node.target is not _TARGET:
        return None
    tokens, ids, gates, weights, biases, present = node.args
    if not all(isinstance(n, fx.Node) and n.op == "get_attr" for n in (*weights, *filter(None, biases))):  # type: ignore[misc, arg-type]
        return "the weights of its experts are computed at run time"
    matrices = [program.tensors[str(n.target)] for n in weights]  # type: ignore[union-attr]
    shifts = [None if n is None else program.tensors[str(n.target)] for n in biases]  # type: ignore[union-attr]
    activations = tuple(n for n in (tokens, ids, gates) if isinstance(n, fx.Node))
    rows, visits = shapes[activations[0]].shape[0], shapes[activations[1]].shape[1]

    def problem(values: Sequence[Tensor]) -> Problem:
        x, where, shares = (*values, None)[:3]
        assert x is not None  # noqa: S101 - they are activations
        assert where is not None  # noqa: S101
        zeros = matrices[0].new_zeros(matrices[0].shape[0])
        expected = moe_reference(x, where, matrices, [zeros if b is None else b for b in shifts], shares)
        parameters = chain.from_iterable(zip(matrices, shifts, strict=True))
        reduction = max(1, x.shape[1] * where.shape[1])
        return Problem(moe_spec(x, where, matrices), None, (x, where, shares, *parameters), expected, reduction)

    name = str(weights[0].target).removesuffix(".experts.0.weight")  # type: ignore[union-attr, index]
    known = TeSA.dense((len(matrices), *matrices[0].shape), format=matrices[0].dtype)
    flops = 2 * rows * visits * matrices[0].numel()
    args = node.args[:-1]
    return Call("moe", name, node, activations, problem, _TARGET, args, known, lambda _: flops, present=str(present))
