"""A prepared model: which weights a scheduler has parametrized, and how to make plain modules of them again.

Every scheduler with fake sparsity works through it. Preparing adds a parametrization to each weight and keeps the very
same Parameter objects, so optimizers built before stay valid, and exporting takes it away again, so that what is left
is the plain model with zeros in it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from sparta.errors import ValueRangeError, message
from sparta.scheduler.fake_sparse import FakeSparseBase
from sparta.sparsify import Layer, find_layers
from sparta.sparsify.shards import local, own_part, whole
from sparta.tesa import names

__all__ = [
    "PreparedLayer",
    "excluded",
    "original_of",
    "plain_copy",
    "plain_state_dict",
    "prepare",
    "refuse_prepared",
    "reshard",
    "restore",
]


@dataclass(frozen=True, eq=False)
class PreparedLayer:
    """One weight and its fake sparsity; None for a layer that is not pruned.

    Parameters
    ----------
    layer
        The layer as it was found; `name` is the weight's plain name.
    fake
        The parametrization, shared by all modules that share the weight.
    places
        Every module and attribute where the weight is used.
    """

    layer: Layer
    fake: FakeSparseBase | None
    places: tuple[tuple[nn.Module, str], ...] = field(default=())

    @property
    def name(self) -> str:
        """The weight's plain name."""
        return self.layer.name

    @property
    def weight(self) -> Tensor:
        """The stored weight, as the optimizer sees it."""
        return original_of(self.layer.module, self.layer.attribute)

    @property
    def value(self) -> Tensor:
        """The stored weight as a plain tensor: itself, or gathered where it is sharded."""
        return whole(local(self.weight), self.weight)

    @torch.no_grad()
    def store(self, value: Tensor) -> None:
        """Write `value` into the stored weight, whole or sharded."""
        local(self.weight).copy_(own_part(value, self.weight))

    @property
    def effective(self) -> Tensor:
        """The weight that an evaluation computes with, whole."""
        with torch.no_grad():
            if self.fake is None or not self.fake.enabled:
                return self.value
            # with the scores whole too, which FSDP shards as it does the weights
            learnt = {name: whole(local(score), score) for name, score in self.fake.named_parameters()}
            trained = self.fake.training
            try:
                made: Tensor = torch.func.functional_call(self.fake.eval(), learnt, (self.value,))
            finally:
                self.fake.train(trained)
            return made


def original_of(module: nn.Module, attribute: str) -> Tensor:
    """Return the stored tensor that is the source of ``getattr(module, attribute)``, parametrized or not."""
    if parametrize.is_parametrized(module, attribute):
        stored: Tensor = module.parametrizations[attribute].original  # type: ignore[index, union-attr]
        return stored
    plain: Tensor = getattr(module, attribute)
    return plain


def prepare(
    model: nn.Module, make_fake: Callable[[Tensor], FakeSparseBase], skipped: Callable[[Layer], bool]
) -> list[PreparedLayer]:
    """Parametrize every weight that can be pruned and is not `skipped`; return all, in the model's order."""
    made = []
    for layer in find_layers(model):
        places = tuple(_places(model, layer.parameter))
        fake = None if skipped(layer) else make_fake(layer.parameter.detach())
        made.append(PreparedLayer(layer, fake, places))
    for prepared in made:
        if prepared.fake is not None:
            for module, attribute in prepared.places:
                prepared.fake.train(module.training)
                parametrize.register_parametrization(module, attribute, prepared.fake, unsafe=True)
    return made


def refuse_prepared(model: nn.Module) -> None:
    """Raise :class:`ValueRangeError` when a scheduler has prepared `model` already."""
    if any(isinstance(module, FakeSparseBase) for module in model.modules()):
        raise ValueRangeError(
            message("the model is already prepared", "a plain model", "export it first, or use the scheduler it has")
        )


def reshard(modules: Iterable[nn.Module]) -> None:
    """Let go of gathered weights: FSDP2 may hold them after an evaluation, and what is written there would be lost."""
    for module in modules:
        if hasattr(module, "reshard") and hasattr(module, "unshard"):
            module.reshard()  # type: ignore[operator]


def restore(layers: Sequence[PreparedLayer]) -> None:
    """Bake the sparse weights into the stored ones and make plain modules again."""
    for prepared in layers:
        if prepared.fake is None:
            continue
        prepared.store(prepared.effective)
        for module, attribute in prepared.places:
            if parametrize.is_parametrized(module, attribute):
                _make_plain(module, attribute)


@torch.no_grad()
def plain_copy(model: nn.Module, layers: Sequence[PreparedLayer]) -> nn.Module:
    """Return a copy of `model` as it would be exported; the model itself stays as it is, and is not sharded."""
    twins: dict[int, nn.Module] = {}
    copied = copy.deepcopy(model, twins)
    for prepared in layers:
        if prepared.fake is not None:
            for module, attribute in prepared.places:
                twin = twins[id(module)]
                original_of(twin, attribute).copy_(prepared.effective)
                _make_plain(twin, attribute)
    return copied


def _make_plain(module: nn.Module, attribute: str) -> None:
    """Take the parametrization of one attribute away; the stored Parameter takes its place.

    PyTorch's own function would take it from the *class*, which deep copies of the module (an average of the weights,
    say) share.
    """
    parameter, kind = original_of(module, attribute), type(module)
    parametrizations: nn.ModuleDict = module.parametrizations  # type: ignore[assignment]
    del parametrizations[attribute]
    if len(parametrizations):
        kept = {key: value for key, value in vars(kind).items() if key not in {attribute, "__dict__", "__weakref__"}}
        module.__class__ = type(kind.__name__, kind.__bases__, kept)
    else:
        del module.parametrizations
        module.__class__ = kind.__bases__[0]
    module.register_parameter(attribute, parameter)  # type: ignore[arg-type]


def plain_state_dict(model: nn.Module, layers: Sequence[PreparedLayer]) -> dict[str, Tensor]:
    """Return the state dict that the exported model would have, without changing the model."""
    baked = {}
    for prepared in layers:
        if prepared.fake is not None:
            for module, attribute in prepared.places:
                baked[id(original_of(module, attribute))] = prepared.effective
    stored = {id(p): p for p in model.parameters()}
    found = {}
    for name, value in model.state_dict(keep_vars=True).items():
        plain = name.replace("parametrizations.", "").removesuffix(".original")
        if "parametrizations." in name and not name.endswith(".original"):
            continue  # a score or a threshold
        tensor = baked.get(id(value), value) if id(value) in stored else value
        found[names.canonical(plain)] = whole(local(tensor), tensor).clone()
    return found


def excluded(layers: Sequence[Layer], keywords: Sequence[str], exact: Sequence[str]) -> tuple[set[str], list[str]]:
    """Return the names of layers not to prune, and the keywords that match none.

    Parameters
    ----------
    keywords
        A layer is left out when its module's name contains one.
    exact
        Names of modules or weights; one that the model does not have is an error.
    """
    by_module = {layer.module_name: layer.name for layer in layers}
    by_weight = {layer.name: layer.name for layer in layers}
    left_out = {
        by_weight[names.resolve(name, by_weight)[0]]
        if name in by_weight
        else by_module[names.resolve(name, by_module)[0]]
        for name in exact
    }
    unmatched = []
    for keyword in keywords:
        found = {name for module, name in by_module.items() if keyword in module}
        if not found:
            unmatched.append(keyword)
        left_out |= found
    return left_out, unmatched


def _places(model: nn.Module, parameter: Tensor) -> Iterator[tuple[nn.Module, str]]:
    for module in model.modules():
        for attribute, value in module.named_parameters(recurse=False, remove_duplicate=False):
            if value is parameter:
                yield module, attribute
