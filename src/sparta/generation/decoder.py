"""Find a decoder by its structure: which modules of a model are the norms, projections and gates of a llama-like stack.

Nothing goes by the name of a class: what has the parts of such a decoder is taken for one, and its results are
compared with the model's before it is used. What does not fit is told in words.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Decoder", "DecoderBlock", "find_decoder"]

_BLOCK = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj"}
_ACTIVATIONS: dict[str, Any] = {"silu": functional.silu, "gelu": functional.gelu, "relu": functional.relu}


@dataclass(frozen=True, eq=False)
class DecoderBlock:
    """One layer of a decoder: names of its linear layers, and its norms."""

    linears: dict[str, str]
    input_norm: Tensor
    middle_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None


@dataclass(frozen=True, eq=False)
class Decoder:
    """What a llama-like decoder is made of.

    Attributes
    ----------
    blocks
        Its layers in order.
    final_norm, head
        The norm after the last layer, and the name of the layer that makes logits.
    sizes
        hidden, heads, kv_heads, head_dim, wide: as ``native/decode.h`` names them.
    window
        The longest sequence in which every token sees all before it; None for no limit.
    """

    blocks: tuple[DecoderBlock, ...]
    final_norm: Tensor
    head: str
    sizes: dict[str, int]
    epsilon: float
    scaling: float
    activation: str
    window: int | None

    def linears(self) -> list[str]:
        """Return the names of all linear layers."""
        return [*(name for block in self.blocks for name in block.linears.values()), self.head]


class _NoDecoderError(Exception):
    """Why a model is no such decoder."""


def find_decoder(model: nn.Module, dtypes: Collection[torch.dtype] = (torch.float32,)) -> Decoder | str:
    """Return the decoder in a model, or in words why it is none.

    Parameters
    ----------
    dtypes
        What its parameters may be in; programs take float32 only.

    >>> find_decoder(nn.Linear(2, 2))
    'it has no decoder layers'
    """
    try:
        return _found(model, dtypes)
    except _NoDecoderError as reason:
        return str(reason)


def _found(model: nn.Module, dtypes: Collection[torch.dtype]) -> Decoder:
    prefix = str(getattr(model, "base_model_prefix", ""))
    base = getattr(model, prefix, None) if prefix else None
    if not isinstance(base, nn.Module) or not isinstance(getattr(base, "layers", None), nn.ModuleList):
        raise _NoDecoderError("it has no decoder layers")
    names = {name for name, _ in base.named_children()}
    if not {"embed_tokens", "layers", "norm", "rotary_emb"} <= names or len(base.layers) == 0:  # type: ignore[arg-type]
        raise _NoDecoderError("it is not a stack of layers with rotary positions between an embedding and a norm")
    if names - {"embed_tokens", "layers", "norm", "rotary_emb"} or {n for n, _ in model.named_children()} != {
        prefix,
        "lm_head",
    }:
        raise _NoDecoderError("it has more parts than a decoder and its head")
    head = model.lm_head
    if type(head) is not nn.Linear or type(base.embed_tokens) is not nn.Embedding:
        raise _NoDecoderError("its head or its embedding is of another kind")
    if any(p.dtype not in dtypes or p.device.type not in ("cpu", "meta") for p in model.parameters()):
        raise _NoDecoderError("it is not in float32 on the CPU")
    blocks = [_block(f"{prefix}.layers.{i}", block) for i, block in enumerate(base.layers)]  # type: ignore[arg-type]
    first: Any = base.layers[0]  # type: ignore[index]
    attention = first.self_attn
    settings = {_settings(block) for block in base.layers}  # type: ignore[union-attr]
    if len(settings) != 1:
        raise _NoDecoderError("its layers differ in their sizes")
    head_dim = int(cast("int", attention.head_dim))
    sizes = {
        "hidden": int(head.in_features),
        "heads": _whole(attention.q_proj.out_features, head_dim),
        "kv_heads": _whole(attention.k_proj.out_features, head_dim),
        "head_dim": head_dim,
        "wide": int(first.mlp.gate_proj.out_features),
    }
    if head_dim % 2 or sizes["heads"] % sizes["kv_heads"]:
        raise _NoDecoderError("its heads are of odd sizes")
    turned = getattr(base.rotary_emb, "inv_freq", None)
    if isinstance(turned, Tensor) and 2 * turned.numel() != head_dim:
        raise _NoDecoderError("its positions turn other sizes than those of its heads")
    return Decoder(
        tuple(blocks),
        _norm(base.norm)[0],
        "lm_head",
        sizes,
        _norm(base.norm)[1],
        float(attention.scaling),
        _activation(first.mlp.act_fn),
        _window(base.layers),
    )


def _block(path: str, block: nn.Module) -> DecoderBlock:
    children = dict(block.named_children())
    if set(children) != _BLOCK:
        raise _NoDecoderError(f"{path} has other parts than attention, MLP and two norms")
    attention, mlp = dict(children["self_attn"].named_children()), dict(children["mlp"].named_children())
    if not _ATTENTION <= set(attention) <= _ATTENTION | _HEAD_NORMS:
        raise _NoDecoderError(f"{path}.self_attn has other parts than four projections")
    if set(mlp) != {*_MLP, "act_fn"}:
        raise _NoDecoderError(f"{path}.mlp is not gated")
    linears = {f"self_attn.{n}": attention[n] for n in sorted(_ATTENTION)} | {f"mlp.{n}": mlp[n] for n in sorted(_MLP)}
    for name, layer in linears.items():
        if type(layer) is not nn.Linear:
            raise _NoDecoderError(f"{path}.{name} is a {type(layer).__name__}")
    norms = [_norm(attention[n])[0] if n in attention else None for n in ("q_norm", "k_norm")]
    return DecoderBlock(
        {name.rpartition(".")[2]: f"{path}.{name}" for name in linears},
        _norm(children["input_layernorm"])[0],
        _norm(children["post_attention_layernorm"])[0],
        norms[0],
        norms[1],
    )


def _norm(norm: Any) -> tuple[Tensor, float]:
    """Return the weight and the epsilon of a norm that divides by the root of the mean square."""
    weight, epsilon = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not isinstance(weight, Tensor) or epsilon is None or weight.dim() != 1 or hasattr(norm, "bias"):
        raise _NoDecoderError(f"a {type(norm).__name__} is none of the norms that are known")
    return weight.detach(), float(epsilon)


def _settings(block: Any) -> tuple[Any, ...]:
    """Return what must be the same in all layers."""
    attention, mlp = block.self_attn, block.mlp
    try:
        numbers = (attention.head_dim, attention.scaling)
    except AttributeError as error:
        raise _NoDecoderError("its attention does not tell its scaling and head size") from error
    linears = [getattr(attention, name) for name in sorted(_ATTENTION)] + [getattr(mlp, name) for name in sorted(_MLP)]
    norms = (_norm(block.input_layernorm)[1], _norm(block.post_attention_layernorm)[1])
    kind = _activation(mlp.act_fn)
    return (*numbers, *norms, kind, *((layer.in_features, layer.out_features) for layer in linears))


def _activation(function: Any) -> str:
    """Return the name of an activation, by what it computes."""
    probe = torch.linspace(-6, 6, 49)
    found = function(probe)
    for name, known in _ACTIVATIONS.items():
        if torch.equal(found, known(probe)):
            return name
    raise _NoDecoderError(f"its activation {type(function).__name__} is none of {', '.join(_ACTIVATIONS)}")


def _window(layers: Any) -> int | None:
    windows = [getattr(layer.self_attn, "sliding_window", None) for layer in layers]
    given = [int(window) for window in windows if window is not None]
    return min(given, default=None)


def _whole(size: int, part: int) -> int:
    if part <= 0 or size % part:
        raise _NoDecoderError("its projections are no whole number of heads")
    return size // part
