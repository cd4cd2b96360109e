"""ADMM: weights are drawn towards a sparse copy of themselves, then pruned to it and retrained.

In the first part of the training a penalty ``rho/2 · ‖W - Z + U‖²`` reaches the gradient at every step, and at each
epoch the copy Z and the dual U are updated; in the second the mask of Z is fixed. The penalty's gradient is added by a
hook before each optimizer step, so the training loop stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparta.errors import ValueRangeError, message
from sparta.scheduler.base import BaseScheduler, Setup, check_iteration
from sparta.scheduler.fake_sparse import FakeSparse
from sparta.scheduler.prepared import PreparedLayer
from sparta.scheduler.registry import register_scheduler
from sparta.sparsify import Candidate, Global
from sparta.sparsify.shards import gradient_part, local, own_part, shards_of, summed, whole
from sparta.spelling import also
from sparta.tesa.select import check_sparsity

__all__ = ["ADMMScheduler"]


@register_scheduler("ADMMScheduler")
class ADMMScheduler(BaseScheduler):
    """Alternating direction method of multipliers, then masked retraining.

    Parameters
    ----------
    setup
        The rest of the configuration; its ``sparsity`` may hold `target_sparsity` and `uniform`, as in the documents.
    no_prune_keyword, no_prune_layer
        Layers that stay dense; see :class:`~sparta.scheduler.base.BaseScheduler`.
    rho
        Weight of the penalty at the start.
    rho_factor, rho_stages
        The weight is multiplied by the factor at each further of these equal stages of the first part.
    admm_fraction
        How much of the training the first part takes.
    target_sparsity
        Sparsity at the end.
    uniform
        True: each layer the same; False: one threshold over all layers.
    """

    takes_sparsity = True

    @also(prune_rate="target_sparsity")
    def __init__(  # noqa: PLR0913, PLR0917 - the paper's numbers, and the common ones
        self,
        setup: Setup | None = None,
        no_prune_keyword: str | Sequence[str] = "",
        no_prune_layer: str | Sequence[str] = "",
        rho: float = 1e-4,
        rho_factor: float = 10.0,
        rho_stages: int = 3,
        admm_fraction: float = 1 / 3,
        target_sparsity: float | None = None,
        uniform: bool | None = None,  # noqa: FBT001
    ) -> None:
        super().__init__(setup, no_prune_keyword, no_prune_layer)
        wanted = dict(self.setup.sparsity)
        for name, value in (("target_sparsity", target_sparsity), ("uniform", uniform)):
            if value is not None and name in wanted:
                raise ValueRangeError(message(f"{name} in `sparsity` and in kwargs", "one of them"))
            wanted |= {} if value is None else {name: value}
        if "target_sparsity" not in wanted:
            raise ValueRangeError(message("ADMMScheduler without a sparsity", "target_sparsity, from 0 to 1"))
        self.target_sparsity = check_sparsity(wanted["target_sparsity"])
        self.uniform = bool(wanted.get("uniform", True))
        if not (rho > 0 and rho_factor >= 1 and rho_stages >= 1 and 0 < admm_fraction <= 1):
            raise ValueRangeError(
                message(
                    f"rho {rho}, rho_factor {rho_factor}, rho_stages {rho_stages}, admm_fraction {admm_fraction}",
                    "above 0, 1 or more, 1 or more, in (0, 1]",
                )
            )
        self.rho, self.rho_factor, self.rho_stages, self.admm_fraction = rho, rho_factor, rho_stages, admm_fraction
        self._iters_per_epoch, self._admm_iters = 0, 0
        self._target: dict[str, Tensor] = {}  # Z
        self._dual: dict[str, Tensor] = {}  # U
        self._iteration, self._attached = 0, False

    @also(max_iters="total_iterations", total_iters="total_iterations")
    def before_run(self, model: nn.Module, iters_per_epoch: int, total_iterations: int) -> None:
        """Begin: the sparse copies are projections of the weights, the duals zero.

        Parameters
        ----------
        iters_per_epoch
            Iterations between two updates of the copies.
        total_iterations
            Iterations of the whole training.
        """
        self._check_prepared(model)
        if not 1 <= iters_per_epoch <= total_iterations:
            given = f"iters_per_epoch is {iters_per_epoch} and total_iterations {total_iterations}"
            raise ValueRangeError(message(given, "1 <= iters_per_epoch <= total_iterations"))
        self._iters_per_epoch = iters_per_epoch
        self._admm_iters = max(
            iters_per_epoch, int(total_iterations * self.admm_fraction) // iters_per_epoch * iters_per_epoch
        )
        self._dual = {prepared.name: torch.zeros_like(local(prepared.weight)) for prepared in self._pruned()}
        self._project()

    def init_optimizer(self, optimizer: Optimizer) -> None:
        """Add the penalty's gradient before each step of `optimizer`."""
        super().init_optimizer(optimizer)
        optimizer.register_step_pre_hook(lambda held, *_: self._add_gradient(held))
        self._attached = True

    def penalty(self) -> Tensor:
        """Return the penalty as a loss with a gradient, for loops that add it instead of calling `init_optimizer`.

        Of sharded weights it is the part of this process, whose gradient is all that this process needs.
        """
        self._check_begun()
        terms = []
        for prepared in self._pruned():
            weight: Any = prepared.weight
            here: Tensor = weight.to_local() if hasattr(weight, "placements") else weight
            apart = here - self._target[prepared.name] + self._dual[prepared.name]
            terms.append(apart.square().sum() * (self.present_rho / 2))
        self._attached = True
        return torch.stack(terms).sum()

    @property
    def present_rho(self) -> float:
        """The penalty's weight now: 0 once the first part is over."""
        if self._iteration >= self._admm_iters:
            return 0.0
        stage = self._iteration * self.rho_stages // max(1, self._admm_iters)
        return self.rho * self.rho_factor**stage

    def prune_model(self, model: nn.Module, iteration: int) -> None:
        """After optimizer step `iteration` (from 0): update the copies at an epoch's end; prune when it is time."""
        self._check_prepared(model)
        check_iteration(iteration)
        self._check_begun()
        if not self._attached:
            raise ValueRangeError(
                message("nothing adds the penalty to the gradient", fix="call `init_optimizer`, or add `penalty()`")
            )
        done = iteration + 1
        self._iteration = done
        if done < self._admm_iters and done % self._iters_per_epoch == 0:
            self._project()
            for prepared in self._pruned():
                name = prepared.name
                self._dual[name] += local(prepared.weight) - self._target[name]
            if self.loggers:
                self.log({"residual": self.residual(model)}, iteration)
        elif done >= self._admm_iters and not self._sparsities:
            self._prune()
            self.log({"sparsity": self.compute_sparse_rate(model)}, iteration)

    def residual(self, model: nn.Module) -> float:
        """Return ``‖W - Z‖ / ‖W‖`` over all layers: small when the weights have reached their sparse copies."""
        self._check_prepared(model)
        self._check_begun()
        apart, norm = 0.0, 0.0
        for prepared in self._pruned():
            weight = local(prepared.weight)
            squares = torch.stack([(weight - self._target[prepared.name]).square().sum(), weight.square().sum()])
            both = summed(squares.double(), shards_of(prepared.weight)).tolist()
            apart, norm = apart + both[0], norm + both[1]
        return (apart / norm) ** 0.5 if norm else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return everything the rest of the run depends on, beside the model's and the optimizer's own states.

        Of sharded weights it holds what this process does, so each process saves and loads its own.
        """
        return {
            **super().state_dict(),
            "iteration": self._iteration,
            "iters_per_epoch": self._iters_per_epoch,
            "admm_iters": self._admm_iters,
            "target": {name: value.clone() for name, value in self._target.items()},
            "dual": {name: value.clone() for name, value in self._dual.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_dict` returned; `before_run` need not be called again."""
        super().load_state_dict(state)
        self._iteration = int(state["iteration"])
        self._iters_per_epoch, self._admm_iters = int(state["iters_per_epoch"]), int(state["admm_iters"])
        devices = {prepared.name: prepared.weight.device for prepared in self._pruned()}
        self._target = {name: value.to(devices[name]).clone() for name, value in state["target"].items()}
        self._dual = {name: value.to(devices[name]).clone() for name, value in state["dual"].items()}

    # ------------------------------------------------------------------ parts

    @torch.no_grad()
    def _add_gradient(self, optimizer: Optimizer) -> None:
        rho = self.present_rho
        if not self._target or rho == 0:
            return
        # a fused optimizer gets gradients that a gradient scaler has not unscaled
        scale = getattr(optimizer, "grad_scale", None)
        for prepared in self._pruned():
            gradient = gradient_part(prepared.weight)
            if gradient is not None:
                apart = local(prepared.weight) - self._target[prepared.name] + self._dual[prepared.name]
                gradient.add_(apart if scale is None else apart * scale, alpha=rho)

    @torch.no_grad()
    def _project(self) -> None:
        """Z: the sparse tensors nearest to W + U; all of what this process holds."""
        rates = self._rates()
        for prepared in self._pruned():
            drawn = self._drawn(prepared)
            mask = own_part(self._mask(prepared, rates[prepared.name]), prepared.weight)
            self._target[prepared.name] = torch.where(mask, drawn, 0.0)

    @torch.no_grad()
    def _prune(self) -> None:
        """Fix the masks that the sparse copies have come to."""
        rates = self._rates()
        for prepared in self._pruned():
            fake = prepared.fake
            if not isinstance(fake, FakeSparse):
                raise ValueRangeError(message(f"ADMM with {type(fake).__name__}", "FakeSparse"))
            weight = prepared.value
            fake.set_mask(self._mask(prepared, rates[prepared.name]), weight)
            if fake.weight_correction:
                prepared.store(weight)
            self._sparsities[prepared.name] = rates[prepared.name]

    def _drawn(self, prepared: PreparedLayer) -> Tensor:
        """W + U, what this process holds of it."""
        return local(prepared.weight) + self._dual[prepared.name]

    def _mask(self, prepared: PreparedLayer, rate: float) -> Tensor:
        """Return the mask of W + U, whole: generators may look at all of a weight, so one at a time is gathered."""
        drawn = whole(self._drawn(prepared), prepared.weight)
        return self.setup.mask_generator.generate_mask(drawn, rate, prepared.layer.input_axis)

    def _rates(self) -> dict[str, float]:
        if self.uniform:
            return {prepared.name: self.target_sparsity for prepared in self._pruned()}
        candidates = [
            Candidate(
                p.name, p.layer.shape, p.weight.numel(), self._drawn(p).abs().flatten(), shards=shards_of(p.weight)
            )
            for p in self._pruned()
        ]
        counts = Global().counts(candidates, self.target_sparsity)
        return {c.name: count / max(1, c.units) for c, count in zip(candidates, counts, strict=True)}

    def _check_begun(self) -> None:
        if not self._target:
            raise ValueRangeError(
                message("the run has not begun", fix="call `before_run(model, iters_per_epoch, max_iters)` first")
            )
