"""The base scheduler: fake sparsity in, plain sparse model out, and everything the other schedulers share.

It prepares a model, measures it, exports it and resumes it; by itself it changes no mask, which is what learnt
thresholds (STR) need. A scheduler belongs to one model, from `prepare_sparse_model` to `export_sparse_model`, and all
it knows is in its `state_dict`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparta.errors import ShapeError, ValueRangeError, message
from sparta.modules import unwrapped
from sparta.scheduler.export import export_onnx
from sparta.scheduler.fake_sparse import FakeSparse, FakeSparseBase, STRFakeSparse
from sparta.scheduler.fuse import fuse_batch_norms
from sparta.scheduler.generators import MaskGenerator, NormalMaskGenerator
from sparta.scheduler.prepared import PreparedLayer, excluded, plain_copy, prepare, refuse_prepared, reshard, restore
from sparta.scheduler.registry import register_scheduler
from sparta.sparsify import Schedule, erk_densities, find_layers
from sparta.sparsify.layers import without_frozen
from sparta.sparsify.logs import RECORDS, Loggers
from sparta.spelling import also
from sparta.tesa import names
from sparta.tesa.attribute import TeSA
from sparta.tesa.formats.mask_bits import pack_bits, unpack_bits
from sparta.tesa.select import check_sparsity
from sparta.tesa.spec import Spec

__all__ = ["BaseScheduler", "Exported", "STRScheduler", "Setup", "check_iteration", "listed", "take_config"]

_LARGEST_SCORE, _HALVINGS = 20.0, 48  # the sigmoid of 20 is nearly 1; halvings until fp32 tells no difference
_FLAGS = ("enabled", "is_set", "fixed")  # of fake sparsity: what a state must bring back


@dataclass(frozen=True)
class Setup:
    """What a configuration says beside the scheduler's own ``kwargs``.

    Parameters
    ----------
    mask_generator
        Makes masks from weights.
    fake_sparse
        Makes the parametrization of one weight.
    leaf_module
        Classes whose modules are not looked into where a model must be traced.
    fuse_bn
        Whether batch norms are folded into the convolutions before them first.
    sparsity
        ``target_sparsity`` and ``uniform``, for the schedulers that take them.
    """

    mask_generator: MaskGenerator = field(default_factory=NormalMaskGenerator)
    fake_sparse: Callable[[Tensor], FakeSparseBase] = FakeSparse
    leaf_module: tuple[type[nn.Module], ...] = ()
    fuse_bn: bool = False
    sparsity: Mapping[str, Any] = field(default_factory=dict)


class Exported(NamedTuple):
    """An exported model, plain modules with zeros in their weights, and what is known of those zeros."""

    model: nn.Module
    spec: Spec


@register_scheduler("BaseScheduler")
class BaseScheduler(Loggers):
    """Prepares, measures, exports; masks change only when :meth:`update_sparsity_per_layer` is called.

    Parameters
    ----------
    setup
        The rest of the configuration.
    no_prune_keyword
        Layers whose name contains one of these are not pruned: a list, or a text with commas.
    no_prune_layer
        Layers with exactly these names are not pruned: a list, or a text with commas.

    Examples
    --------
    >>> scheduler = BaseScheduler()
    >>> model = scheduler.prepare_sparse_model(nn.Linear(8, 4))
    >>> scheduler.update_sparsity_per_layer(model, 0.75)
    >>> model, spec = scheduler.export_sparse_model(model)
    >>> spec.density, type(model).__name__
    (0.25, 'Linear')
    """

    def __init__(
        self,
        setup: Setup | None = None,
        no_prune_keyword: str | Sequence[str] = "",
        no_prune_layer: str | Sequence[str] = "",
    ) -> None:
        self.setup = setup or Setup()
        self.no_prune_keyword = listed(no_prune_keyword)
        self.no_prune_layer = listed(no_prune_layer)
        self._layers: list[PreparedLayer] = []
        self._sparsities: dict[str, float] = {}

    # ------------------------------------------------------------------ preparing

    def prepare_sparse_model(self, model: nn.Module, config: Mapping[str, Any] | None = None) -> nn.Module:
        """Make the weights of `model` fake-sparse, in place, and return it; it computes as before until a mask is set.

        Build the optimizer after this call if fake sparsity has parameters of its own (STR, ProbMask), or pass the
        one you have to :meth:`init_optimizer`.

        Parameters
        ----------
        config
            A configuration of the same scheduler, in place of the one that it was built from.
        """
        take_config(self, config)
        if self._layers:
            raise ValueRangeError(message("this scheduler has prepared a model already", "one model a scheduler"))
        refuse_prepared(model)
        if self.setup.fuse_bn:
            fuse_batch_norms(model, self.setup.leaf_module)
        layers = find_layers(model)
        if any(hasattr(layer.parameter, "placements") for layer in layers):
            raise ShapeError(
                message(
                    "the model is sharded already", "a model that is not", "prepare it first, then call fully_shard"
                )
            )
        left_out, unmatched = excluded(layers, self.no_prune_keyword, self.no_prune_layer)
        if unmatched:
            text = f"no layer's name contains {', '.join(map(repr, unmatched))}"
            warnings.warn(message(text, fix="check no_prune_keyword"), stacklevel=2)
        trained = {layer.name for layer in without_frozen(layers)}
        left_out |= {layer.name for layer in layers} - trained
        self._layers = prepare(model, self.setup.fake_sparse, lambda layer: layer.name in left_out)
        for fake in self._fakes().values():
            fake.begin(self.setup.mask_generator)
        return model

    def init_optimizer(self, optimizer: Optimizer) -> None:
        """Check that `optimizer` trains the prepared model, and give it the learnt scores if it lacks them."""
        self._check_prepared()
        held = self._check_optimizer(optimizer)
        missing = [score for score in self.score_parameters() if id(score) not in held]
        if missing:
            optimizer.add_param_group({"params": missing})

    def score_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that fake sparsity has added: thresholds, probabilities."""
        return [parameter for fake in self._fakes().values() for parameter in fake.parameters()]

    # ------------------------------------------------------------------ training

    def prune_model(self, model: nn.Module, iteration: int) -> None:
        """Do what is due after step `iteration` (from 0). Here: nothing; masks are set explicitly or learnt."""
        self._check_prepared(model)
        check_iteration(iteration)

    def update_sparsity_per_layer(self, model: nn.Module, rate: float | Mapping[str, float]) -> None:
        """Make new masks now: one sparsity for all layers, or one by layer name."""
        self._check_prepared(model)
        if isinstance(rate, Mapping):
            known = {prepared.layer.module_name: prepared.name for prepared in self._pruned()}
            known |= {prepared.name: prepared.name for prepared in self._pruned()}
            rates = {known[names.resolve(name, known)[0]]: check_sparsity(value) for name, value in rate.items()}
        else:
            rates = {prepared.name: check_sparsity(rate) for prepared in self._pruned()}
        for prepared in self._pruned():
            if prepared.name in rates:
                self._set_sparsity(prepared, rates[prepared.name])

    def get_sparsities_erdos_renyi(
        self,
        model: nn.Module,
        default_sparsity: float,
        erk_power_scale: float = 0.5,
        *,
        include_kernel: bool = True,
    ) -> dict[str, float]:
        """Spread one sparsity over the layers by ERK, make the masks, and return each layer's."""
        self._check_prepared(model)
        pruned = self._pruned()
        shapes = [p.layer.shape for p in pruned]
        densities = erk_densities(
            shapes, check_sparsity(default_sparsity), erk_power_scale, include_kernel=include_kernel
        )
        rates = {p.name: 1 - density for p, density in zip(pruned, densities, strict=True)}
        self.update_sparsity_per_layer(model, rates)
        return rates

    # ------------------------------------------------------------------ measuring, exporting

    def compute_sparse_rate(self, model: nn.Module) -> float:
        """Return the measured fraction of zeros in the weights that the model computes with.

        All layers that can be pruned count, those that are left out too.
        """
        self._check_prepared(model)
        zeros = sum(int((prepared.effective == 0).sum()) for prepared in self._layers)
        return zeros / max(1, sum(prepared.weight.numel() for prepared in self._layers))

    def export_sparse_model(self, model: nn.Module) -> Exported:
        """Bake the zeros into the weights and make plain modules again, in place.

        Returns
        -------
        Exported
            The model and the :class:`~sparta.tesa.spec.Spec` of its pruned weights.
        """
        self._check_prepared(model)
        pruned = self._pruned()
        restore(self._layers)
        spec = Spec({p.name: TeSA.from_zeros(p.value) for p in pruned})
        self._layers = []
        return Exported(model, spec)

    @also(dummy_input="example_inputs", inputs="example_inputs")
    def export_sparse_onnx(
        self,
        model: nn.Module,
        example_inputs: Any,
        path: str | os.PathLike[str],
        **options: Any,
    ) -> None:
        """Write the model as ONNX with its zeros baked in; the model itself stays as it is. Needs the `onnx` extra.

        Parameters
        ----------
        example_inputs
            A tensor or a tuple of them; the documents call it ``dummy_input``.
        path
            The file; ``.onnx`` is added where it is missing.
        options
            Passed on to :func:`torch.onnx.export`: opset, dynamic shapes, names.
        """
        self._check_prepared(model)
        if any(hasattr(prepared.weight, "placements") for prepared in self._layers):
            raise ShapeError(
                message(
                    "an ONNX file of a sharded model",
                    "a whole model",
                    "load its full state into a plain model first",
                )
            )
        export_onnx(plain_copy(unwrapped(model), self._layers), example_inputs, path, options)

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return everything the rest of the run depends on, beside the model's and the optimizer's own states."""
        masks = {}
        for name, fake in self._fakes().items():
            mask = getattr(fake, "mask", None)
            if mask is not None:
                masks[name] = pack_bits(mask.reshape(1, -1))[0].cpu()
        flags = {name: [bool(getattr(f, a, False)) for a in _FLAGS] for name, f in self._fakes().items()}
        return {"type": type(self).__name__, "masks": masks, "flags": flags, "sparsities": dict(self._sparsities)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_dict` returned, after preparing the same model; load its weights too."""
        self._check_prepared()
        if state.get("type") != type(self).__name__:
            raise ValueRangeError(message(f"the state of a {state.get('type')!r}", f"that of a {type(self).__name__}"))
        fakes = self._fakes()
        if state["flags"].keys() != fakes.keys():
            odd = sorted(state["flags"].keys() ^ fakes.keys())[:5]
            raise ValueRangeError(message(f"the state and the model differ in the layers {odd}", "the same layers"))
        for name, fake in fakes.items():
            if name in state["masks"]:
                mask: Tensor = fake.mask  # type: ignore[assignment]
                bits = state["masks"][name].to(mask.device)
                mask.copy_(unpack_bits(bits.reshape(1, -1), mask.numel()).reshape(mask.shape))
            for attribute, value in zip(_FLAGS, state["flags"][name], strict=True):
                if hasattr(fake, attribute):
                    setattr(fake, attribute, bool(value))
        self._sparsities = {name: float(rate) for name, rate in state["sparsities"].items()}

    # ------------------------------------------------------------------ parts

    def _set_sparsity(self, prepared: PreparedLayer, rate: float) -> None:
        value = prepared.value
        mask = self.setup.mask_generator.generate_mask(value, rate, prepared.layer.input_axis)
        self._sparsities[prepared.name] = rate
        if not isinstance(prepared.fake, FakeSparse):
            raise ValueRangeError(message(f"{type(prepared.fake).__name__} takes no mask", "FakeSparse"))
        prepared.fake.set_mask(mask, value)
        if prepared.fake.weight_correction:
            prepared.store(value)

    def _pruned(self) -> list[PreparedLayer]:
        return [prepared for prepared in self._layers if prepared.fake is not None]

    def _fakes(self) -> dict[str, FakeSparseBase]:
        return {prepared.name: prepared.fake for prepared in self._layers if prepared.fake is not None}

    def _check_optimizer(self, optimizer: Optimizer) -> set[int]:
        """Return the ids of the parameters that `optimizer` holds; an error when no weight is among them."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not any(id(prepared.weight) in held for prepared in self._layers):
            raise ValueRangeError(
                message(
                    f"the {type(optimizer).__name__} holds no weight of the prepared model",
                    "an optimizer of its parameters",
                    "build it from model.parameters()",
                )
            )
        return held

    def _check_prepared(self, model: nn.Module | None = None) -> None:
        if not self._layers:
            raise ValueRangeError(
                message("the model is not prepared", fix="call `model = scheduler.prepare_sparse_model(model)` first")
            )
        if model is not None:
            modules = set(model.modules())
            if not any(module in modules for module, _ in self._layers[0].places):
                raise ValueRangeError(
                    message("this is not the model that was prepared", "it or a wrapper of it", "pass that one")
                )
            reshard(modules)


@register_scheduler("STRScheduler")
class STRScheduler(BaseScheduler):
    """The base scheduler under the name that goes with STR, with a sparsity to aim at if one is given.

    Without one, what is pruned depends on the first thresholds and on weight decay alone. With one, all thresholds move
    together after each step until the network has the scheduled sparsity; what layers learn is how they differ.

    Parameters
    ----------
    setup, no_prune_keyword, no_prune_layer
        As of :class:`BaseScheduler`.
    target_sparsity
        Of all pruned layers together, at the end.
    total_iterations
        Training iterations; the sparsity rises over the first 60 percent of them.
    """

    @also(prune_rate="target_sparsity", total_iters="total_iterations", max_iters="total_iterations")
    def __init__(
        self,
        setup: Setup | None = None,
        no_prune_keyword: str | Sequence[str] = "",
        no_prune_layer: str | Sequence[str] = "",
        target_sparsity: float | None = None,
        total_iterations: int | None = None,
    ) -> None:
        super().__init__(setup, no_prune_keyword, no_prune_layer)
        self.schedule: Schedule | None = None
        self.total_iterations = total_iterations or 0
        if target_sparsity is not None:
            if total_iterations is None or total_iterations < 1:
                raise ValueRangeError(
                    message(f"target_sparsity with total_iterations {total_iterations}", "1 or more iterations")
                )
            end = max(1, round(0.6 * total_iterations))
            self.schedule = Schedule.cubic(check_sparsity(target_sparsity), end=end)

    @torch.no_grad()
    def prune_model(self, model: nn.Module, iteration: int) -> None:
        """Move the thresholds to the sparsity that is scheduled after step `iteration` (from 0), if one is."""
        super().prune_model(model, iteration)
        if self.schedule is None:
            return
        layers = [(p.value.abs(), p.fake) for p in self._pruned() if isinstance(p.fake, STRFakeSparse)]
        wanted = round(self.schedule.at(iteration) * sum(weight.numel() for weight, _ in layers))
        starts = [float(fake.scores.detach()) for _, fake in layers]
        low, high = -_LARGEST_SCORE - max(starts), _LARGEST_SCORE - min(starts)
        for _ in range(_HALVINGS):
            shift = (low + high) / 2
            pruned = sum(int((weight <= torch.sigmoid(fake.scores + shift)).sum()) for weight, fake in layers)
            low, high = (low, shift) if pruned >= wanted else (shift, high)
        for _, fake in layers:
            fake.scores.add_(high)
        if iteration % max(1, self.total_iterations // RECORDS) == 0:
            self.log({"sparsity": self.schedule.at(iteration)}, iteration)

    def export_sparse_model(self, model: nn.Module) -> Exported:
        """Bake the soft-thresholded weights in; warns when the thresholds have pruned nothing."""
        exported = super().export_sparse_model(model)
        if exported.spec.density == 1.0:
            text = "the learnt thresholds have pruned nothing"
            fix = "give target_sparsity and total_iterations, or begin at sInit_value=-5 with weight decay"
            warnings.warn(message(text, fix=fix), stacklevel=2)
        return exported


def take_config(scheduler: Any, config: Mapping[str, Any] | None) -> None:
    """Make a scheduler that has prepared no model what `config` describes; None leaves it as it is."""
    if config is None:
        return
    from sparta.scheduler.config import build_sparse_scheduler

    made = build_sparse_scheduler(config)
    if type(made) is not type(scheduler):
        given = f"a configuration of {type(made).__name__} for a {type(scheduler).__name__}"
        raise ValueRangeError(message(given, "the same scheduler", "build another one"))
    if getattr(scheduler, "_layers", None) or getattr(scheduler, "_all", None):
        raise ValueRangeError(message("this scheduler has prepared a model already", "one model a scheduler"))
    loggers = scheduler.loggers
    scheduler.__dict__.update(made.__dict__)
    scheduler.loggers.extend(logger for logger in loggers if logger not in scheduler.loggers)


def listed(given: str | Sequence[str]) -> list[str]:
    """Return names from a list or a text with commas, without the ``module.`` that wrappers add.

    >>> listed("module.fc, conv1,")
    ['fc', 'conv1']
    """
    parts = given.split(",") if isinstance(given, str) else list(given)
    return [names.canonical(part.strip()) for part in parts if part.strip()]


def check_iteration(iteration: int) -> None:
    """Raise :class:`ValueRangeError` unless `iteration` is an integer of 0 or more."""
    if isinstance(iteration, bool) or not isinstance(iteration, int) or iteration < 0:
        raise ValueRangeError(message(f"iteration is {iteration!r}", "0 or more, counted from 0"))
