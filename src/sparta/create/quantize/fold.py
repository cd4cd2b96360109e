"""Batch norms under quantization: which follow a convolution, and how their statistics freeze.

A deployed network has no batch norms; each is part of the convolution before it. With one scale for each output channel
the fold only multiplies those scales, so training needs nothing special; with one scale for the whole weight the
quantizer must see the folded weight already while training, and it does.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Self

from torch import fx, nn

from sparta.batch_norms import NORMS, is_foldable, pairs_in_graph

__all__ = ["conv_norm_pairs", "freeze_statistics", "unfreeze_statistics"]


def conv_norm_pairs(model: nn.Module) -> list[tuple[str, str]]:
    """Return the names of each convolution and the batch norm that alone uses its output.

    The model is traced for it. One that cannot be traced is searched for `nn.Sequential` containers only, where the
    order is plain; nothing found there means that batch norms stay modules of their own, which is right but slower.

    Examples
    --------
    >>> conv_norm_pairs(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()))
    [('0', '1')]
    """
    modules = dict(model.named_modules())
    if not any(isinstance(m, NORMS) for m in modules.values()):
        return []
    try:
        graph = fx.Tracer().trace(model)
    except Exception:  # noqa: BLE001 - tracing runs the user's code with proxies, which can fail in any way
        return _pairs_in_sequentials(model)
    return pairs_in_graph(graph, modules)


def _pairs_in_sequentials(model: nn.Module) -> list[tuple[str, str]]:
    pairs = []
    for path, module in model.named_modules():
        if type(module) is nn.Sequential:
            children = [(f"{path}.{name}" if path else name, child) for name, child in module.named_children()]
            for (conv_name, conv), (norm_name, norm) in pairwise(children):
                if is_foldable(conv, norm):
                    pairs.append((conv_name, norm_name))
    return pairs


class _Frozen(nn.Module):
    """Mixed into a batch norm's class: it normalises with its running statistics and leaves them alone."""

    plain_class: type[nn.Module]

    def train(self, mode: bool = True) -> Self:  # noqa: FBT001, FBT002 - torch's signature
        del mode
        return super().train(mode=False)

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return _frozen_instance, (self.plain_class,), self.__dict__.copy()


_FROZEN_CLASSES: dict[type[nn.Module], Any] = {}


def _frozen_class(plain: type[nn.Module]) -> Any:
    if plain not in _FROZEN_CLASSES:
        body = {"__module__": __name__, "plain_class": plain}
        _FROZEN_CLASSES[plain] = type(f"Frozen{plain.__name__}", (_Frozen, plain), body)
    return _FROZEN_CLASSES[plain]


def _frozen_instance(plain: type[nn.Module]) -> Any:
    made = _frozen_class(plain)
    return made.__new__(made)


def freeze_statistics(model: nn.Module) -> list[str]:
    """Freeze the running statistics of every batch norm, also through later calls of ``model.train()``.

    Scale and shift go on learning. Returns the names of the frozen norms.

    >>> model = nn.Sequential(nn.BatchNorm1d(3))
    >>> freeze_statistics(model), model.train()[0].training
    (['0'], False)
    """
    frozen = []
    for name, module in model.named_modules():
        if isinstance(module, NORMS) and module.track_running_stats and not isinstance(module, _Frozen):
            module.__class__ = _frozen_class(type(module))
            module.eval()
            frozen.append(name)
    return frozen


def unfreeze_statistics(model: nn.Module) -> None:
    """Undo :func:`freeze_statistics`; call ``model.train()`` to let the statistics move again."""
    for module in model.modules():
        if isinstance(module, _Frozen):
            module.__class__ = module.plain_class  # type: ignore[assignment]
