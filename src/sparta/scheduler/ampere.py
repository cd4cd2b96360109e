"""The N:M scheduler: dense weights become 2:4 (or any N:M) once, and stay so through training.

It wraps nothing: masks are computed when the optimizer is handed over and held after each of its steps. The order of
calls is `prepare_sparse_model`, `init_optimizer`, then plain training as it was.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from sparta.errors import ShapeError, ValueRangeError, message
from sparta.scheduler.base import Exported, Setup, check_iteration, take_config
from sparta.scheduler.channels import find_spaces
from sparta.scheduler.export import export_onnx
from sparta.scheduler.fuse import fuse_batch_norms
from sparta.scheduler.mask_calculators import mask_calculator
from sparta.scheduler.permutation import kept_magnitude, search_permutation
from sparta.scheduler.prepared import refuse_prepared
from sparta.scheduler.registry import register_scheduler
from sparta.scheduler.spaces import columns_read, owner_of, permute_space
from sparta.sparsify import Layer, Masks, find_layers
from sparta.sparsify.layers import without_frozen
from sparta.sparsify.logs import Loggers
from sparta.sparsify.shards import local, own_part, shards_of, summed, whole
from sparta.spelling import also

__all__ = ["AmpereScheduler"]

_LOG = logging.getLogger("sparta.scheduler")
_WHITELIST = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.MultiheadAttention)


@register_scheduler("AmpereScheduler")
class AmpereScheduler(Loggers):
    """Trains a model with N:M weights, as the sparse tensor cores of GPUs run them.

    Parameters
    ----------
    setup
        The rest of the configuration; only `leaf_module` and `fuse_bn` matter here.
    mask_calculator
        ``m4n2_1d``, ``m4n2_2d_best``, ``m4n2_2d_greedy``, or the same with other numbers.
    verbosity
        0: silent. 1: log what is left out. 2: log every layer.
    whitelist
        Classes of modules whose weights are pruned; linear layers, convolutions and attention by default.
    allow_recompute_mask
        Remember pruned values, so that :meth:`compute_sparse_masks` may be called again and chooses among all weights.
    allow_permutation
        First reorder channels so that the masks keep more magnitude; what the model computes does not change.
    alignment
        Output and input channels must be multiples of these, as the hardware wants; others stay dense.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 8))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> scheduler = AmpereScheduler(verbosity=0)
    >>> model = scheduler.prepare_sparse_model(model)
    >>> scheduler.init_optimizer(optimizer)
    >>> model(torch.randn(4, 32)).sum().backward()
    >>> optimizer.step()
    >>> scheduler.compute_sparse_rate(model)
    0.5
    """

    def __init__(
        self,
        setup: Setup | None = None,
        mask_calculator: str = "m4n2_1d",
        verbosity: int = 2,
        whitelist: Sequence[type] | None = None,
        allow_recompute_mask: bool = False,  # noqa: FBT001, FBT002 - the document's
        allow_permutation: bool = False,  # noqa: FBT001, FBT002
        alignment: tuple[int, int] = (8, 16),
    ) -> None:
        self.setup = setup or Setup()
        self.mask_calculator = mask_calculator
        self._calculate = _calculator(mask_calculator)
        self.verbosity = verbosity
        self.whitelist = tuple(whitelist) if whitelist is not None else _WHITELIST
        self.allow_recompute_mask, self.allow_permutation = allow_recompute_mask, allow_permutation
        if len(alignment) != 2 or any(size < 1 for size in alignment):
            raise ValueRangeError(message(f"alignment is {alignment}", "two numbers of 1 or more"))
        self.alignment = alignment
        self._masks: Masks | None = None
        self._all: list[Layer] = []
        self._is_set = False

    def prepare_sparse_model(self, model: nn.Module, config: Mapping[str, Any] | None = None) -> nn.Module:
        """Choose the layers, reorder channels if allowed, and return the same model; nothing is pruned yet."""
        take_config(self, config)
        if self._masks is not None:
            raise ValueRangeError(message("this scheduler has prepared a model already", "one model a scheduler"))
        refuse_prepared(model)
        if self.setup.fuse_bn:
            fuse_batch_norms(model, self.setup.leaf_module)
        self._all = find_layers(model)
        chosen = [layer for layer in without_frozen(self._all) if self._is_eligible(layer)]
        if not chosen:
            raise ValueRangeError(
                message(
                    "no layer of the model can be pruned",
                    f"{', '.join(t.__name__ for t in self.whitelist)} with output and input channels that are "
                    f"multiples of {self.alignment}",
                    "change `alignment` or `whitelist`",
                )
            )
        if self.allow_permutation:
            if any(hasattr(layer.parameter, "placements") for layer in self._all):
                raise ShapeError(
                    message(
                        "channels of a sharded model", "a model that is not", "permute first, then call fully_shard"
                    )
                )
            self._permute(model, chosen)
        self._masks = Masks(chosen, pruned="keep" if self.allow_recompute_mask else "forget")
        return model

    def init_optimizer(self, optimizer: Optimizer) -> None:
        """Prune now, and hold the masks after every step of `optimizer`."""
        masks = self._held()
        masks.attach(optimizer)
        if not self._is_set:
            self.compute_sparse_masks()

    def compute_sparse_masks(self) -> None:
        """Choose the masks from the present weights; a second time only with `allow_recompute_mask`."""
        masks = self._held()
        if self._is_set and not self.allow_recompute_mask:
            raise ValueRangeError(
                message(
                    "the masks are computed, and the values they pruned are gone",
                    "one computation",
                    "pass allow_recompute_mask=True to keep them",
                )
            )
        with masks.exposed(), torch.no_grad():
            made = {
                name: own_part(self._calculate(whole(local(p), p), layer.input_axis), p)
                for name, layer in masks.layers.items()
                for p in (layer.parameter,)
            }
        masks.set(made)
        self._is_set = True
        self.log({"sparsity": masks.sparsity}, 0)
        for name, mask in made.items():
            self._tell(2, "%s: kept %.1f %% of the weights", name, 100 * float(mask.float().mean()))

    def restore_pruned_weights(self) -> None:
        """Make the model dense again with the values that were pruned; needs `allow_recompute_mask`."""
        masks = self._held()
        if not self.allow_recompute_mask:
            raise ValueRangeError(message("the pruned values are gone", fix="pass allow_recompute_mask=True"))
        masks.set({name: torch.ones_like(masks[name]) for name in masks.layers})
        self._is_set = False

    def prune_model(self, model: nn.Module, iteration: int) -> None:
        """Do nothing: masks are fixed once they are computed, and held by the optimizer's own steps."""
        self._check_model(model)
        check_iteration(iteration)

    def compute_sparse_rate(self, model: nn.Module) -> float:
        """Return the measured fraction of zeros in the weights of all layers that can be pruned."""
        self._check_model(model)
        zeros = sum(int(summed((local(layer.parameter) == 0).sum(), shards_of(layer.parameter))) for layer in self._all)
        return zeros / max(1, sum(layer.parameter.numel() for layer in self._all))

    def export_sparse_model(self, model: nn.Module) -> Exported:
        """Let go of the optimizer; the model is plain already. Returns it and what is pruned."""
        self._check_model(model)
        masks = self._held()
        masks.apply()
        masks.detach()
        spec = masks.spec()
        self._masks = None
        return Exported(model, spec)

    @also(dummy_input="example_inputs", inputs="example_inputs")
    def export_sparse_onnx(
        self,
        model: nn.Module,
        example_inputs: Any,
        path: str | os.PathLike[str],
        **options: Any,
    ) -> None:
        """Write the model as ONNX; needs the `onnx` extra."""
        self._check_model(model)
        export_onnx(model, example_inputs, path, options)

    def state_dict(self) -> dict[str, Any]:
        """Return the masks and the remembered values."""
        return {"type": type(self).__name__, "is_set": self._is_set, "masks": self._held().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_dict` returned; load the model's weights, then call `init_optimizer`.

        With `allow_permutation` the saved weights are in the order found before; prepare the new model without it.
        """
        if state.get("type") != type(self).__name__:
            raise ValueRangeError(message(f"the state of a {state.get('type')!r}", f"that of a {type(self).__name__}"))
        self._held().load_state_dict(state["masks"])
        self._is_set = bool(state["is_set"])

    # ------------------------------------------------------------------ parts

    def _is_eligible(self, layer: Layer) -> bool:
        if not layer.parameter.requires_grad or not isinstance(layer.module, self.whitelist):
            return False
        inputs = layer.shape[layer.input_axis]
        outputs = layer.shape[1 - layer.input_axis]
        if outputs % self.alignment[0] or inputs % self.alignment[1]:
            self._tell(1, "%s of shape %s stays dense: not a multiple of %s", layer.name, layer.shape, self.alignment)
            return False
        return True

    def _permute(self, model: nn.Module, chosen: Sequence[Layer]) -> None:
        m, n = (int(number) for number in re.findall(r"\d+", self.mask_calculator)[:2])
        sparse = {id(layer.module) for layer in chosen}
        for space in find_spaces(model, self.setup.leaf_module):
            readers = [(module, start) for module, start in space.readers if id(owner_of(module)) in sparse]
            width = space.block or space.size or 0
            # groups of m must not lie across the parts of a concatenation
            if space.fixed or not readers or width % m or width < 2 * m or any(start % m for _, start in readers):
                continue
            orders, before, after = [], 0.0, 0.0
            for block in space.blocks():
                matrix = torch.cat([columns_read(module, start, block) for module, start in readers])
                order = search_permutation(matrix, n, m)
                before += kept_magnitude(matrix, n, m)
                after += kept_magnitude(matrix[:, order], n, m)
                orders.append(order + block.start)
            self._tell(2, "%d channels reordered: %.6g of magnitude kept, %.6g before", space.size, after, before)
            permute_space(space, torch.cat(orders))

    def _tell(self, level: int, text: str, *values: object) -> None:
        if self.verbosity >= level:
            _LOG.info(text, *values)

    def _held(self) -> Masks:
        if self._masks is None:
            raise ValueRangeError(
                message("the model is not prepared", fix="call `model = scheduler.prepare_sparse_model(model)` first")
            )
        return self._masks

    def _check_model(self, model: nn.Module) -> None:
        layer = next(iter(self._held().layers.values()))
        if all(parameter is not layer.parameter for parameter in model.parameters()):
            raise ValueRangeError(
                message("this is not the model that was prepared", "it or a wrapper of it", "pass that one")
            )


_calculator = mask_calculator  # the argument of the same name hides it
