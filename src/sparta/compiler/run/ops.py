"""Ops of a compiled graph that run one of our kernels, which a text among their arguments names.

Attention under a fixed mask, products with a fixed sparse matrix, and mixtures of experts take several activations, so
they are ops and not kernel modules. A graph with these ops says all there is to say (the choice is text in it), so it
is saved, loaded and moved as it is; where a named kernel does not run, dense does.
"""

# ruff: noqa: FBT001 - schemas of ops have no keyword-only arguments

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.weak import WeakTensorKeyDictionary

from sparta.errors import SpartaError, ValueRangeError, message
from sparta.specialize.attention.spec import attention_spec
from sparta.specialize.cuda.graphs import keep
from sparta.specialize.implement import Kernel
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.matmul.spec import Product
from sparta.specialize.moe.spec import moe_spec
from sparta.specialize.tuning.select import DENSE, build

__all__ = ["config_text", "experts", "fixed_product", "masked_attention", "product_with", "without_operators"]

_State = tuple[Kernel, Sequence[Tensor]]
# By the tensor that a kernel was built for, as long as it lives: its version, and kernels by what else they depend on.
_built: Any = WeakTensorKeyDictionary()


def config_text(config: Mapping[str, Any]) -> str:
    """Return a choice as the text that ops take.

    >>> config_text({"_name": "dense"})
    '{"_name": "dense"}'
    """
    return json.dumps(dict(config), sort_keys=True)


@torch.library.custom_op("sparta::masked_attention", mutates_args=())
def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, config: str) -> Tensor:
    """Return ``softmax(q k^T / sqrt(E)) v`` over the pairs that a bool mask (..., M, N) keeps."""
    key = (config, q.dtype, q.shape[-1], v.shape[-1], q.dim())
    kernel, packed = _state(mask, key, config, lambda: (attention_spec(mask, q, k, v), mask))
    return kernel.run(packed, q, k, v).contiguous()  # as the fake one says


@masked_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, config: str) -> Tensor:
    del k, mask, config
    return q.new_empty(*q.shape[:-1], v.shape[-1])


@torch.library.custom_op("sparta::fixed_product", mutates_args=())
def fixed_product(x: Tensor, matrix: Tensor, left: bool, config: str) -> Tensor:
    """Return ``matrix @ x`` if the matrix is on the left, else ``x @ matrix``; its zeros are skipped."""
    A, B = (matrix, x) if left else (x, matrix)  # noqa: N806 - the operands' names

    def spec_and_mask() -> tuple[KernelSpec, Tensor]:
        mask = matrix != 0
        return product_with(left=left).spec(mask, A, B), mask

    kernel, packed = _state(matrix, (config, left, x.dtype, x.dim()), config, spec_and_mask)
    return kernel.run(packed, A, B).contiguous()


@fixed_product.register_fake
def _(x: Tensor, matrix: Tensor, left: bool, config: str) -> Tensor:
    del config
    return torch.matmul(matrix, x) if left else torch.matmul(x, matrix)


def product_with(*, left: bool) -> Product:
    """Return which product it is, for a sparse matrix on the left or on the right."""
    return Product("sdd" if left else "dsd")


@torch.library.custom_op("sparta::experts", mutates_args=())
def experts(
    tokens: Tensor, ids: Tensor, gates: Tensor | None, weights: list[Tensor], biases: list[Tensor | None], config: str
) -> Tensor:
    """Return (T, N): for tokens (T, K) the sum of the answers of their experts, ids (T, k), by gates (T, k) or 1."""
    kernel = _experts_kernel(
        config, tuple(tokens.shape), tokens.dtype, tokens.device, ids.shape[1], len(weights), tuple(weights[0].shape)
    )
    return kernel.run((), tokens, ids, gates, *chain.from_iterable(zip(weights, biases, strict=True))).contiguous()


@experts.register_fake
def _(
    tokens: Tensor, ids: Tensor, gates: Tensor | None, weights: list[Tensor], biases: list[Tensor | None], config: str
) -> Tensor:
    del ids, gates, biases, config
    return tokens.new_empty(tokens.shape[0], weights[0].shape[0])


@lru_cache(maxsize=64)
def _experts_kernel(
    config: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    visits: int,
    count: int,
    sizes: tuple[int, ...],
) -> Kernel:
    # Only devices, dtypes and sizes count: no tensor is made here but on the device that holds nothing.
    tokens, ids = torch.empty(shape, dtype=dtype, device="meta"), torch.empty(shape[0], visits, device="meta")
    spec = moe_spec(tokens, ids, [torch.empty(sizes, dtype=dtype, device="meta")] * count)
    return _kernel(KernelSpec(spec.op, spec.operands, spec.epilogue, spec.attributes, device.type), config)


def without_operators(graph: fx.Graph) -> None:
    """Put PyTorch's own calls in the places of these ops, for programs that run a graph without Python.

    Raises :class:`ValueRangeError` for a mixture of experts, which has no such form.
    """
    for node in list(graph.nodes):
        with graph.inserting_before(node):
            if node.target is torch.ops.sparta.masked_attention.default:
                fresh = graph.call_function(torch.ops.aten.scaled_dot_product_attention.default, node.args[:4])
            elif node.target is torch.ops.sparta.fixed_product.default:
                x, matrix, left = node.args[:3]
                sides = (matrix, x) if left else (x, matrix)
                fresh = graph.call_function(torch.ops.aten.matmul.default, sides)
            elif node.target is torch.ops.sparta.experts.default:
                given = f"{node.name}, a mixture of experts"
                raise ValueRangeError(message(given, "calls that run without Python", "write it as dense layers"))
            else:
                continue
        node.replace_all_uses_with(fresh)
        graph.erase_node(node)


def _state(
    held: Tensor, key: tuple[Any, ...], config: str, spec_and_mask: Callable[[], tuple[KernelSpec, Tensor]]
) -> _State:
    """Return the kernel that was built for a tensor as it is now, with its packed index."""
    version = 0 if held.is_inference() else held._version
    known: tuple[int, dict[Any, _State]] | None = _built.get(held)
    if known is None or known[0] != version:
        known = (version, {})
        _built[held] = known
    if key not in known[1]:
        spec, mask = spec_and_mask()
        kernel = _kernel(spec, config)
        known[1][key] = (kernel, kernel.pack(mask))
    return keep(known[1][key]) if held.is_cuda else known[1][key]


def _kernel(spec: KernelSpec, config: str) -> Kernel:
    try:
        return build(spec, json.loads(config))
    except (SpartaError, ValueError, KeyError, TypeError, AttributeError) as error:  # a stored text may say anything
        reason = str(error).splitlines()[0]
        warnings.warn(f"the kernel {config} does not run here ({reason}); dense does", stacklevel=4)
        return build(spec, {"_name": DENSE})
