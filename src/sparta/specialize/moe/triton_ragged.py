"""The ragged Triton product as an implement: ``triton-ragged`` for mixtures of experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparta.errors import ValueRangeError, message
from sparta.specialize.cuda.device import FORMATS, bulk_copies, need_triton, on_cuda, triton_here
from sparta.specialize.implement import Cause, Params, Support, TiledImplement, present
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.moe.op import ragged_forward, ragged_linear
from sparta.specialize.moe.spec import MoEKernel
from sparta.specialize.moe.tile import RaggedTile

__all__ = ["TritonRagged"]

_MOST_EXPERTS = 1024


class _RaggedKernel(MoEKernel):
    """Rows are sorted by expert in their own order and summed in float32: equal inputs give equal bits."""

    def __init__(self, tile: RaggedTile) -> None:
        need_triton()
        self._tile = str(tile)

    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        del packed
        (tokens, ids), gates, parameters = present(*inputs[:2]), inputs[2], inputs[3:]
        weights, given = present(*parameters[::2]), parameters[1::2]
        biases = _biases(given, weights[0])
        if tokens.dtype != weights[0].dtype:
            raise ValueRangeError(message(f"tokens in {tokens.dtype}", f"{weights[0].dtype}, as the weights", "cast"))
        learning = torch.is_grad_enabled() and any(
            tensor is not None and tensor.requires_grad for tensor in (tokens, gates, *parameters)
        )
        # The op's own bookkeeping over so many tensors takes longer than the kernels of a small batch.
        call = ragged_linear if learning or torch.compiler.is_compiling() else ragged_forward
        y: Tensor = call(tokens, ids.contiguous(), gates, list(weights), biases, self._tile)
        return y


def _biases(given: Sequence[Tensor | None], weight: Tensor) -> list[Tensor]:
    """Return a bias for each expert, or none at all where no expert has one."""
    if all(bias is None for bias in given):
        return []
    zero = weight.new_zeros(weight.shape[0]) if any(bias is None for bias in given) else weight
    return [zero if bias is None else bias.contiguous() for bias in given]


class TritonRagged(TiledImplement):
    """One Triton kernel for the products of all experts, any number of tokens each, with gradients."""

    name = "triton-ragged"
    op = "moe"
    first_run_compiles = True

    def supports(self, spec: KernelSpec) -> Support:
        """Fp32, bf16 and fp16 on CUDA, two experts or more."""
        weight, tokens = spec["weight"], spec["tokens"]
        if spec.device != "cuda":
            return on_cuda(spec.device)
        if str(tokens.format) not in FORMATS or str(weight.format) != str(tokens.format):
            given = f"tokens in {tokens.format} and weights in {weight.format}"
            return Support.no(f"it computes both in one of {', '.join(FORMATS)}, not {given}", Cause.DTYPE)
        if not 1 < weight.shape[0] <= _MOST_EXPERTS or min(weight.shape) < 1:
            reason = f"weights of shape {weight.shape}; it takes 2 to {_MOST_EXPERTS} experts, none empty"
            return Support.no(reason, Cause.SHAPE)
        return triton_here() and Support.yes("one ragged product for all experts")

    def tiles(self, spec: KernelSpec) -> Sequence[object]:
        """Return the tiles that are worth timing, the best guess first."""
        return _tiles(spec)

    def build(self, spec: KernelSpec, params: Params) -> MoEKernel:
        """Return the kernel; it is compiled at its first run."""
        del spec
        return _RaggedKernel(RaggedTile.parse(params["tile"]))


def _tiles(spec: KernelSpec) -> list[RaggedTile]:
    """Return the tiles worth timing, the best guess first: by how many rows an expert has on average."""
    rows = spec["tokens"].shape[0] * spec.attributes["top_k"] / spec["weight"].shape[0]
    tma = int(bulk_copies())
    if str(spec["tokens"].format) == "fp32":
        return [RaggedTile(64, 64, 32, 2, 4, 2), RaggedTile(32, 64, 32, 2, 4, 2), RaggedTile(16, 32, 32, 2, 4, 4)]
    if rows <= 16:
        return [
            RaggedTile(16, 64, 128, 4, 4, 4),
            RaggedTile(16, 32, 128, 4, 4, 4),
            RaggedTile(16, 128, 64, 4, 4, 4, tma),
        ]
    if rows <= 64:
        return [RaggedTile(64, 64, 64, 4, 4, 3, tma), RaggedTile(64, 128, 64, 4, 4, 2, tma), RaggedTile(32, 128, 64, 4, 4, 3, tma)]  # fmt: skip  # noqa: E501
    return [
        RaggedTile(128, 256, 64, 3, 8, 0, tma, 1),
        RaggedTile(128, 128, 64, 3, 4, 2, tma, 1, tma),
        RaggedTile(128, 256, 64, 4, 8, 0, tma, 0, tma),
        RaggedTile(128, 256, 64, 4, 8, 0, tma, 1),
        RaggedTile(128, 128, 64, 3, 4, 0, tma, 1),
    ]
