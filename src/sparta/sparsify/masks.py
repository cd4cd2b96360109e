"""Masks that hold: pruned weights are exactly zero after every optimizer step, whatever the optimizer does.

A holder keeps one mask per layer and hangs on the optimizer's own step hooks, so momentum, weight decay, foreach and
fused kernels, gradient accumulation and skipped steps of a gradient scaler need no special case. The forward pass sees
plain parameters with real zeros in them; nothing is wrapped, so `torch.compile` sees nothing new.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from sparta.errors import NameNotFoundError, ShapeError, ValueRangeError, did_you_mean, message
from sparta.sparsify.layers import Layer
from sparta.sparsify.shards import gradient_part, local, packed, shards_of, summed_counts, taken, unpacked, whole
from sparta.tesa import names
from sparta.tesa.attribute import TeSA
from sparta.tesa.mask import as_mask
from sparta.tesa.spec import Spec

__all__ = ["Masks", "zero_moments"]

Gradients = Literal["masked", "dense"]
Pruned = Literal["forget", "keep", "train"]
OptimizerState = Literal["zero", "keep"]

_VERSION = 1
_NOT_A_MOMENT = frozenset({"step_size"})  # Rprop's: zero would stop a weight that comes back for good


def zero_moments(optimizer: Optimizer, parameter: Tensor, where: Tensor | None = None) -> None:
    """Zero what an optimizer remembers of past gradients of a parameter, so that without a gradient it rests.

    Parameters
    ----------
    where
        Bool, of the shape of what this process holds of the parameter: only these elements. None: all.
    """
    for key, value in optimizer.state.get(parameter, {}).items():
        if isinstance(value, Tensor) and value.shape == parameter.shape and key not in _NOT_A_MOMENT:
            here = local(value)
            here.zero_() if where is None else here.masked_fill_(where, 0)


class Masks:
    """The masks of some layers, held while an optimizer trains them.

    Parameters
    ----------
    layers
        What may be pruned. Until :meth:`set` is called nothing is.
    gradients
        ``"masked"``: the gradient of a pruned weight is zero when the optimizer sees it. ``"dense"``: it is left as it
        is, so that it still moves the optimizer's state (the weight stays zero all the same).
    pruned
        What becomes of the values of pruned weights. ``"forget"``: gone; a weight that comes back starts at zero.
        ``"keep"``: remembered as they were, and back when the weight is. ``"train"``: straight-through; they go on
        learning, unseen by the forward pass, from the gradient of the zeros in their place.
    optimizer_state
        ``"zero"``: momentum and second moments of pruned weights are zeroed whenever masks change. ``"keep"``: not.
    before_step
        Called just before each optimizer step, with the values of ``pruned="train"`` in place.

    Examples
    --------
    >>> from sparta.sparsify import find_layers
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    >>> masks = Masks(find_layers(model)).attach(optimizer)
    >>> masks.set({"weight": torch.tensor([[1, 0, 1, 0], [0, 1, 0, 1]])})
    >>> model(torch.randn(3, 4)).sum().backward()
    >>> optimizer.step()
    >>> (model.weight == 0).sum().item(), masks.sparsity
    (4, 0.5)
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        *,
        gradients: Gradients = "masked",
        pruned: Pruned = "forget",
        optimizer_state: OptimizerState = "zero",
        before_step: Callable[[Optimizer], None] | None = None,
    ) -> None:
        for what, given, allowed in (
            ("gradients", gradients, get_args(Gradients)),
            ("pruned", pruned, get_args(Pruned)),
            ("optimizer_state", optimizer_state, get_args(OptimizerState)),
        ):
            if given not in allowed:
                raise NameNotFoundError(did_you_mean(str(given), allowed, f"value of {what}"))
        self.layers = {layer.name: layer for layer in layers}
        self.gradients: Gradients = "dense" if pruned == "train" else gradients
        self.pruned: Pruned = pruned
        self.optimizer_state: OptimizerState = optimizer_state
        self._before_step = before_step
        self._zeros: dict[str, Tensor] = {}  # True where pruned: the form that `masked_fill_` takes
        self._hidden: dict[str, Tensor] = {}  # values of pruned weights; elsewhere meaningless
        self._optimizers: list[Optimizer] = []
        self._handles: list[Any] = []

    # ------------------------------------------------------------------ the optimizer

    def attach(self, *optimizers: Optimizer) -> Masks:
        """Hold the masks at every step of these optimizers, until :meth:`detach`; returns itself.

        Raises :class:`ValueRangeError` when an optimizer holds none of the layers, and warns of trainable layers that
        none of them holds: their masks are right now, but nothing keeps them.
        """
        held: set[int] = set()
        wanted = {id(layer.parameter): layer.name for layer in self.layers.values()}
        for optimizer in optimizers:
            here = {id(p) for group in optimizer.param_groups for p in group["params"]} & wanted.keys()
            if not here:
                raise ValueRangeError(
                    message(
                        f"the {type(optimizer).__name__} holds none of the {len(wanted)} layers to prune",
                        "an optimizer of the model's own parameters",
                        "build it from model.parameters() after the model is where it will be trained",
                    )
                )
            held |= here
        lost = [layer.name for layer in self.layers.values() if layer.parameter.requires_grad]
        lost = [name for name in lost if id(self.layers[name].parameter) not in held]
        if lost:
            text = f"no optimizer holds {', '.join(lost[:5])}{' ...' if len(lost) > 5 else ''}"
            warnings.warn(message(text, fix="attach the one that trains them, or leave them out"), stacklevel=2)
        self.detach()
        self._optimizers = list(optimizers)
        for optimizer in optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._enter_step))
            self._handles.append(optimizer.register_step_post_hook(self._leave_step))
        return self

    def detach(self) -> None:
        """Stop holding; the weights stay as they are."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._optimizers = [], []

    @torch.no_grad()
    def _enter_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.pruned == "train":
            self._restore()
        if self._before_step is not None:
            self._before_step(optimizer)
        if self.gradients == "dense":
            return None
        self._mask_gradients()
        return self._with_masked_closure(args, kwargs)

    def _mask_gradients(self) -> None:
        for name, zeros in self._zeros.items():
            gradient = gradient_part(self.layers[name].parameter)
            if gradient is not None:
                gradient.masked_fill_(zeros, 0)

    def _with_masked_closure(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments of a step with a closure whose gradients are masked each time: LBFGS calls it often."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            return None

        def masked() -> Any:
            loss = closure()
            self._mask_gradients()
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": masked}
        return (args[0], masked, *args[2:]), kwargs

    def _leave_step(self, *_: object) -> None:
        if self.pruned == "train":
            self._remember()
        self.apply()

    # ------------------------------------------------------------------ masks

    @torch.no_grad()
    def set(self, masks: Mapping[str, Tensor]) -> None:
        """Take new masks for some layers or all (True or 1: kept), and zero what they prune.

        Parameters
        ----------
        masks
            By layer name; each of the shape of the weight, or of what of it is here. A name that is not
            given keeps its mask.
        """
        with self.exposed():
            for given, mask in masks.items():
                name = names.resolve(given, self.layers)[0]
                weight = local(self.layers[name].parameter)
                if mask.shape != weight.shape:
                    raise ShapeError(
                        message(f"the mask of {name!r} is {tuple(mask.shape)}", f"{tuple(weight.shape)}, as the weight")
                    )
                self._zeros[name] = as_mask(mask).to(weight.device).logical_not().contiguous()
        if self.optimizer_state == "zero":
            self._zero_moments()

    @contextmanager
    def exposed(self) -> Iterator[None]:
        """Put the remembered values of pruned weights in place for the ``with`` block, and the zeros back after it."""
        with torch.no_grad():
            self._restore()
        try:
            yield
        finally:
            with torch.no_grad():
                if self.pruned != "forget":
                    self._remember()
                self.apply()

    @torch.no_grad()
    def apply(self) -> None:
        """Zero every pruned weight, now."""
        for name, zeros in self._zeros.items():
            local(self.layers[name].parameter).masked_fill_(zeros, 0)

    def __getitem__(self, name: str) -> Tensor:
        """Return the mask of a layer (True: kept), a fresh tensor; all True before one is set."""
        found = names.resolve(name, self.layers)[0]
        zeros = self._zeros.get(found)
        if zeros is None:
            return torch.ones_like(local(self.layers[found].parameter), dtype=torch.bool)
        return ~zeros

    def to_dict(self) -> dict[str, Tensor]:
        """Return all masks by layer name."""
        return {name: self[name] for name in self.layers}

    @property
    def sparsity(self) -> float:
        """Pruned fraction of all elements of all layers, counted over all processes."""
        total = sum(layer.parameter.numel() for layer in self.layers.values())
        return sum(self.pruned_counts().values()) / total if total else 0.0

    def pruned_counts(self) -> dict[str, int]:
        """Return how many elements of each layer are pruned, counted over all processes."""
        weights = [layer.parameter for layer in self.layers.values()]
        here = [
            torch.zeros((), dtype=torch.int64, device=local(weight).device)
            if name not in self._zeros
            else torch.count_nonzero(self._zeros[name])
            for name, weight in zip(self.layers, weights, strict=True)
        ]
        return dict(zip(self.layers, summed_counts(here, [shards_of(weight) for weight in weights]), strict=True))

    def spec(self) -> Spec:
        """Return the masks as a :class:`~sparta.tesa.spec.Spec`; gathers the masks of sharded layers."""
        return Spec(
            {
                name: TeSA.from_mask(whole(self[name], layer.parameter), format=layer.parameter.dtype)
                for name, layer in self.layers.items()
            }
        )

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return the masks, eight elements to a byte, and the remembered values; tensors and plain values only.

        Sharded layers are gathered, one at a time, so all processes call it together; what it returns is the same in
        each, and can be loaded in another number of processes.
        """
        parameters = {name: layer.parameter for name, layer in self.layers.items()}
        return {
            "version": _VERSION,
            "masks": {name: packed(~zeros, parameters[name]) for name, zeros in self._zeros.items()},
            "hidden": {name: whole(values.clone(), parameters[name]) for name, values in self._hidden.items()},
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_dict` returned, for the same layers; load the model's weights before."""
        if state.get("version") != _VERSION:
            raise ValueRangeError(message(f"a state of version {state.get('version')!r}", f"version {_VERSION}"))
        zeros, hidden = {}, {}
        for name, bits in state["masks"].items():
            found = names.resolve(name, self.layers)[0]
            zeros[found] = unpacked(bits, self.layers[found].parameter).logical_not()
        for name, values in state["hidden"].items():
            found = names.resolve(name, self.layers)[0]
            hidden[found] = taken(values, self.layers[found].parameter)
        self._zeros, self._hidden = zeros, hidden
        self.apply()

    # ------------------------------------------------------------------ parts

    def _restore(self) -> None:
        for name, zeros in self._zeros.items():
            if name in self._hidden:
                weight = local(self.layers[name].parameter)
                weight.copy_(torch.where(zeros, self._hidden[name], weight))

    def _remember(self) -> None:
        for name in self._zeros:
            weight = local(self.layers[name].parameter)
            if name in self._hidden:
                self._hidden[name].copy_(weight)
            else:
                self._hidden[name] = weight.clone()

    def _zero_moments(self) -> None:
        for optimizer in self._optimizers:
            if isinstance(optimizer, torch.optim.LBFGS):
                optimizer.state.clear()  # its directions mix all parameters: those of other masks lead astray
            for name, zeros in self._zeros.items():
                zero_moments(optimizer, self.layers[name].parameter, zeros)
