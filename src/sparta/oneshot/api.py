"""`prune`: one verb after training, with or without data.

The run goes through the model in the order in which it computes: a stage (a block of a chain, or layers that share an
input) is calibrated with everything before it already pruned, then its layers are pruned one by one, and the result
stands in the model. The spec that comes back says where the zeros are; the log says what they cost.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from sparta.errors import NameNotFoundError, SpartaError, ValueRangeError, did_you_mean, message
from sparta.oneshot.budget import counts_of, patterns_of
from sparta.oneshot.calibrate import Grams, Stop, call, listed, moved, quiet
from sparta.oneshot.log import LayerLog, PruneLog
from sparta.oneshot.methods import Method, find_method, magnitude
from sparta.oneshot.problem import Problem
from sparta.oneshot.refine import refine_block
from sparta.oneshot.resume import Checkpoint, fingerprint
from sparta.oneshot.stages import Chain, Stage, find_chain, order
from sparta.oneshot.targets import Target, find_targets
from sparta.sparsify.allocation import Allocation
from sparta.tesa.attribute import TeSA
from sparta.tesa.patterns import Pattern
from sparta.tesa.spec import Spec

__all__ = ["prune"]


@torch.no_grad()
def prune(  # noqa: PLR0913 - one verb, and all but four of its arguments by name
    model: nn.Module,
    data: Iterable[Any] | None = None,
    pattern: Pattern | str | Mapping[str, Pattern | str] = "2:4",
    sparsity: float | Mapping[str, float] | None = None,
    *,
    method: str = "auto",
    include: Sequence[str] | str | None = None,
    ignore: Sequence[str] | str | None = None,
    allocation: Allocation | str = "uniform",
    refine: str | None = None,
    device: torch.device | str | None = None,
    progress: Callable[[int, int, str], None] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
) -> tuple[Spec, PruneLog]:
    """Prune a trained model at once, in place.

    Parameters
    ----------
    data
        Batches as the model takes them: tensors, tuples of arguments or dicts of keyword arguments. It is read once
        and kept. Without data only ``"magnitude"`` can be used.
    pattern, sparsity
        A pattern, its text form, or a mapping from layer names (globs, ``re:`` patterns) to patterns; the fraction of
        units to prune, or a mapping of the same kind to fractions. N:M has a sparsity of its own.
    method
        ``"magnitude"``, ``"wanda"``, ``"ria"``, ``"sparsegpt"``, ``"alps"``, ``"obc"`` or ``"swaps"``;
        ``"auto"`` is ALPS with data and magnitude without.
    include, ignore
        Names of parameters, globs or ``re:`` patterns. By default the weights of linear layers and convolutions
        except those shared with an embedding and a language model's output head.
    allocation
        How the sparsity is spread over layers: ``"uniform"``, ``"global"``, ``"erk"``, ``"lamp"``, ``"energy"``, or an
        :class:`~sparta.sparsify.Allocation`.
    refine
        ``"block"`` trains the remaining weights of each block for a few steps towards the dense block's outputs.
    device
        Where to compute; the model goes back to where it was. None: where it is.
    progress
        Called before each stage with its number, the number of stages and its name.
    checkpoint
        A folder for finished stages. A run that was killed goes on from there, with the same result.

    Returns
    -------
    tuple of Spec and PruneLog
        Where the zeros are, and what each layer lost.

    Examples
    --------
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    >>> spec, log = prune(model, [torch.randn(64, 16)], "2:4")
    >>> spec.check(model)
    >>> [layer.density for layer in log]
    [0.5, 0.5]
    """
    if refine not in {None, "block"}:
        raise NameNotFoundError(did_you_mean(str(refine), ["block"], "refinement"))
    chosen = find_method(("magnitude" if data is None else "alps") if method == "auto" else method)
    if data is None and (chosen.needs_data or refine):
        raise ValueRangeError(
            message(f"{f'method {chosen.name!r}' if chosen.needs_data else 'refine'} without data", fix="pass `data`")
        )
    targets = find_targets(model, include, ignore)
    patterns = patterns_of(targets, pattern)
    targets = [target for target in targets if target.name in patterns]
    counts = counts_of(targets, patterns, sparsity, allocation)
    home = next(model.parameters()).device
    if device is not None:
        model.to(device)
    where = next(model.parameters()).device
    batches = None if data is None else [moved(batch, where) for batch in listed(data)]
    run = _Run(model, batches, chosen, patterns, counts, refine is not None)
    if checkpoint is not None:
        settings = f"{chosen.name} {sorted((k, str(v)) for k, v in patterns.items())} {sorted(counts.items())} {refine}"
        run.checkpoint = Checkpoint(checkpoint, fingerprint(targets, batches or [], settings))
    started = time.perf_counter()
    try:
        with quiet(model):
            run.go(targets, progress)
    finally:
        if device is not None:
            model.to(home)
    run.log.seconds = time.perf_counter() - started
    spec = Spec(
        {
            target.name: TeSA.from_mask(run.masks[target.name].to(home), format=target.parameter.dtype)
            for target in targets
            if target.name in run.masks
        }
    )
    return spec, run.log


@dataclass(eq=False)
class _Run:
    """One run over a model."""

    model: nn.Module
    batches: list[Any] | None
    method: Method
    patterns: Mapping[str, Pattern]
    counts: Mapping[str, int | None]
    refine: bool
    checkpoint: Checkpoint | None = None
    chain: Chain | None = None
    captured: bool = False
    shared: dict[int, dict[str, Any]] = field(default_factory=dict)
    masks: dict[str, Tensor] = field(default_factory=dict)
    log: PruneLog = field(init=False)

    def __post_init__(self) -> None:
        self.log = PruneLog(self.method.name + ("+block" if self.refine else ""))

    def go(self, targets: list[Target], progress: Callable[[int, int, str], None] | None) -> None:
        """Prune stage after stage."""
        stages, unused = self._stages(targets)
        for number, stage in enumerate(stages):
            if progress is not None:
                progress(number, len(stages), stage.name)
            done = None if self.checkpoint is None else self.checkpoint.load(number, stage.targets)
            masks, logs = done or self._prune(stage)
            if done is None and self.checkpoint is not None:
                self.checkpoint.save(number, stage.targets, masks, logs)
            self.masks |= masks
            self.log.layers += logs
        self.log.layers += [
            LayerLog(t.name, "", 1.0, None, None, 0.0, "never called by the data, left dense") for t in unused
        ]

    def _stages(self, targets: list[Target]) -> tuple[list[Stage], list[Target]]:
        if self.batches is None:
            return [Stage(target.name, [target]) for target in targets], []
        self.chain = find_chain(self.model, targets, self.batches[0])
        stages, unused = order(self.model, targets, self.batches[0], self.chain)
        if self.refine and self.chain is None:
            raise ValueRangeError(
                message(
                    "refine='block' on a model without a chain of blocks",
                    "a ModuleList or Sequential whose children run one after the other",
                    "leave `refine` out",
                )
            )
        return stages, unused

    def _prune(self, stage: Stage) -> tuple[dict[str, Tensor], list[LayerLog]]:
        started = time.perf_counter()
        self.shared.clear()  # of the stage before, whose matrices are gone
        grams, wanted = self._calibrate(stage, self.batches or [])
        dense = {target.name: target.parameter.detach().clone() for target in stage.targets if wanted is not None}
        calibrated = (time.perf_counter() - started) / len(stage.targets)
        masks: dict[str, Tensor] = {}
        logs: list[LayerLog] = []
        for target in stage.targets:
            started = time.perf_counter()
            masks[target.name], log = self._prune_layer(target, grams[target.name])
            logs.append(replace(log, seconds=calibrated + time.perf_counter() - started))
        if wanted is not None and self.chain is not None:
            started = time.perf_counter()
            refine_block(self.chain, stage.targets, masks, wanted)
            share = (time.perf_counter() - started) / len(stage.targets)
            errors = [self._problem(t, grams[t.name], dense[t.name]).relative_error(_matrix(t)) for t in stage.targets]
            logs = [
                replace(log, error=error, seconds=log.seconds + share) for log, error in zip(logs, errors, strict=True)
            ]
        return masks, logs

    def _calibrate(self, stage: Stage, batches: Sequence[Any]) -> tuple[Grams, list[Tensor] | None]:
        """Return the Gram matrices of a stage, and the dense outputs of its block where they are wanted."""
        grams = Grams(stage.targets)
        chain = self._chain_at(stage, batches)
        if chain is None:
            for index, batch in enumerate(batches):
                with contextlib.suppress(Stop), grams.watch(stop_after=True):
                    call(self.model, batch, index)
            return grams, None
        outputs: list[Tensor] = []
        for batch in range(len(batches)):
            with grams.watch():
                output = chain.run(batch)
            if self.refine:
                outputs.append(output)
        return grams, outputs or None

    def _chain_at(self, stage: Stage, batches: Sequence[Any]) -> Chain | None:
        """Return the chain, brought to the stage's block; None when the stage is not one of its blocks."""
        if self.chain is None or stage.block is None:
            return None
        if not self.captured:
            self.captured = True
            if not self.chain.capture(self.model, batches):
                self.chain = None
                return None
        while self.chain.position < stage.block:
            self.chain.advance()
        return self.chain

    def _prune_layer(self, target: Target, gram: Tensor | None) -> tuple[Tensor, LayerLog]:
        """Prune one layer in place; return its mask and its log."""
        problem = self._problem(target, gram, target.parameter.detach())
        try:
            solution = self.method.solve(problem)
        except SpartaError as error:
            raise type(error)(message(f"{target.name}: {str(error).rstrip('.')}")) from error
        if not bool(solution.weight.isfinite().all()):
            raise ValueRangeError(
                message(f"{target.name}: method {self.method.name!r} gave weights that are not finite")
            )
        plain = magnitude(problem).weight
        target.parameter.copy_(target.seen(problem.layout.to_weight(solution.weight)))
        mask = target.seen(problem.layout.to_weight(solution.mask))
        density = float(mask.double().mean())
        reached = problem.relative_error(_matrix(target))
        log = LayerLog(target.name, str(problem.pattern), density, problem.relative_error(plain), reached, 0.0)
        return mask, log

    def _problem(self, target: Target, gram: Tensor | None, weight: Tensor) -> Problem:
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        matrix = target.layout.to_matrix(target.seen(weight).to(dtype))
        shared = self.shared.setdefault(id(gram), {}) if gram is not None else {}
        pattern, count = self.patterns[target.name], self.counts[target.name]
        return Problem(matrix.clone(), gram, pattern, count, target.layout, shared)


def _matrix(target: Target) -> Tensor:
    return target.layout.to_matrix(target.seen(target.parameter.detach()))
