"""The activation-weighted score: a weight matters as much as it is large *and* its input is.

It needs some data to run through the model, which :meth:`ActivationWeighted.watch` listens to. Only one number per
input channel is kept (the sum of squares), whatever the amount of data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sparta.errors import ValueRangeError, message
from sparta.sparsify.layers import Layer
from sparta.sparsify.scores import Score
from sparta.sparsify.shards import local, shards_of

__all__ = ["ActivationWeighted"]

_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class ActivationWeighted(Score):
    """``|W| · ‖X‖``: the weight times the norm of the input channel it multiplies, over all data seen.

    Examples
    --------
    >>> from sparta.sparsify.layers import find_layers
    >>> model = nn.Linear(2, 1, bias=False)
    >>> layers = find_layers(model)
    >>> score = ActivationWeighted()
    >>> with score.watch(layers):
    ...     _ = model(torch.tensor([[3.0, 0.0], [4.0, 1.0]]))
    >>> (score(layers[0]) / model.weight.detach().abs()).tolist()
    [[5.0, 1.0]]
    """

    name = "activation"

    def __init__(self) -> None:
        self._squares: dict[str, Tensor] = {}

    @contextmanager
    def watch(self, layers: Sequence[Layer]) -> Iterator[None]:
        """Listen to every forward pass inside the ``with`` block."""

        def listen(layer: Layer) -> Any:
            def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                squares = _squares_of(layer, args, kwargs)
                before = self._squares.get(layer.name)
                self._squares[layer.name] = squares if before is None else before + squares

            return layer.module.register_forward_pre_hook(hook, with_kwargs=True)

        handles = [listen(layer) for layer in layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def __call__(self, layer: Layer) -> Tensor:
        """Return the weighted magnitudes; the layer must have run inside :meth:`watch`."""
        if layer.name not in self._squares:
            raise ValueRangeError(
                message(
                    f"no input of {layer.name!r} was seen",
                    "layers that ran inside `watch`, as modules",
                    "run data through the model under `score.watch(layers)`, or leave the layer out with `ignore`",
                )
            )
        weight = local(layer.parameter)
        norms = _spread(layer, self._squares[layer.name].sqrt())
        shards = shards_of(layer.parameter)
        if not shards.is_whole:  # the norms are those of all channels
            cuts = zip(shards.slices(), norms.shape, strict=True)
            norms = norms[tuple(cut if size > 1 else slice(None) for cut, size in cuts)]
        return weight.abs() * norms

    def state_dict(self) -> dict[str, Tensor]:
        """Return the sums of squares by layer."""
        return {name: squares.clone() for name, squares in self._squares.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take back the sums of squares."""
        self._squares = {name: squares.clone() for name, squares in state.items()}


@torch.no_grad()
def _squares_of(layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the sum of squares of each input channel; three rows (query, key, value) for packed attention."""
    module = layer.module
    if isinstance(module, nn.MultiheadAttention):
        given = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
        used = ["query", "key", "value"] if layer.attribute == "in_proj_weight" else [_ATTENTION[layer.attribute]]
        return torch.stack([given[name].detach().float().square().flatten(0, -2).sum(0) for name in used])
    x: Tensor = args[0] if args else next(iter(kwargs.values()))
    if isinstance(module, nn.Embedding):  # the input of a row is how often it is looked up
        return torch.bincount(x.flatten(), minlength=module.num_embeddings).float()
    spread: Any = x  # a layer that is cut by columns gets its input cut as well
    x = (spread.full_tensor() if hasattr(x, "placements") else x).detach().float()
    if isinstance(module, _CONVS + _TRANSPOSED):
        spatial = module.weight.dim() - 2
        if x.dim() == spatial + 1:
            x = x.unsqueeze(0)
        return x.square().movedim(1, 0).flatten(1).sum(1)
    return x.square().reshape(-1, x.shape[-1]).sum(0)


_ATTENTION = {"q_proj_weight": "query", "k_proj_weight": "key", "v_proj_weight": "value"}


def _spread(layer: Layer, norms: Tensor) -> Tensor:
    """Return the norms of the input channels in a shape that multiplies the weight."""
    module, rows = layer.module, layer.shape[0]
    if isinstance(module, nn.MultiheadAttention):
        return norms.repeat_interleave(rows // norms.shape[0], 0)
    trailing = [1] * (len(layer.shape) - 2)
    if isinstance(module, (nn.Embedding, *_TRANSPOSED)):
        return norms.view(-1, 1, *trailing)
    if isinstance(module, _CONVS) and module.groups > 1:
        grouped = norms.view(module.groups, -1)
        return grouped.repeat_interleave(rows // module.groups, 0).view(rows, -1, *trailing)
    return norms.view(1, -1, *trailing)
