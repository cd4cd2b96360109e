"""One run over a model, stage after stage, in the order in which the model computes.

A stage (a block of a chain, or layers that share an input) is calibrated with everything before it already pruned, then
its layers are pruned one by one, and the result stands in the model, or on disk for a model larger than memory.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from sparta.common.progress import Progress, Step, many_view
from sparta.errors import SpartaError, ValueRangeError, message
from sparta.oneshot.calibrate import Grams, Stop, call
from sparta.oneshot.log import LayerLog, PruneLog
from sparta.oneshot.methods import Method, magnitude
from sparta.oneshot.offload import Offload, Spill
from sparta.oneshot.packed import PackedSpec
from sparta.oneshot.problem import Problem
from sparta.oneshot.refine import refine_block
from sparta.oneshot.resume import Checkpoint
from sparta.oneshot.stages import Chain, Stage, find_chain, order
from sparta.oneshot.targets import Target
from sparta.oneshot.team import Team
from sparta.tesa.attribute import TeSA
from sparta.tesa.formats.mask_bits import pack_bits, unpack_bits
from sparta.tesa.patterns import Pattern
from sparta.tesa.spec import Spec

__all__ = ["Run"]


@dataclass(eq=False)
class Run:
    """One run over a model.

    Parameters
    ----------
    batches
        Those of this process; None where there is no data.
    patterns, counts
        By layer: the pattern, and how many units go.
    team
        The processes that prune together.
    offload
        Where weights come from and go to; None for a model that is in memory.
    spill
        Whether hidden states are kept in files.
    """

    model: nn.Module
    batches: list[Any] | None
    method: Method
    patterns: Mapping[str, Pattern]
    counts: Mapping[str, int | None]
    refine: bool
    team: Team = field(default_factory=Team)
    offload: Offload | None = None
    spill: bool = False
    checkpoint: Checkpoint | None = None
    chain: Chain | None = None
    captured: bool = False
    shared: dict[int, dict[str, Any]] = field(default_factory=dict)
    masks: dict[str, tuple[Tensor, int]] = field(default_factory=dict)
    log: PruneLog = field(init=False)

    def __post_init__(self) -> None:
        self.log = PruneLog(self.method.name + ("+block" if self.refine else ""))

    def go(self, targets: list[Target], progress: Progress | bool | None) -> None:  # noqa: FBT001 - as people pass it
        """Prune stage after stage."""
        if self.offload is not None:
            self.offload.attach(_blocks(self.model, targets))
        stages, unused = self._stages(targets)
        if self.offload is not None:
            self.offload.check([stage.targets for stage in stages])
        with many_view(progress, len(stages), "pruning") as view:
            for number, stage in enumerate(stages):
                view.trials(stage.name)
                with self._present(stage):
                    logs = self._stage(number, stage)
                self.log.layers += logs
                view.done(Step(stage.name, PruneLog(self.log.method, logs, sum(log.seconds for log in logs)).brief))
        self.log.layers += [
            LayerLog(t.name, "", 1.0, None, None, 0.0, "never called by the data, left dense") for t in unused
        ]

    def spec(self, targets: Sequence[Target], home: torch.device) -> Spec:
        """Return where the zeros are; packed, where the model is larger than memory."""
        if self.offload is not None:
            dtypes = {target.name: target.parameter.dtype for target in targets}
            return PackedSpec({name: (*mask, dtypes[name]) for name, mask in self.masks.items()})
        found: dict[str, TeSA] = {}
        for target in targets:
            if target.name in self.masks:
                packed, columns = self.masks[target.name]
                mask = unpack_bits(packed, columns).to(home)
                found[target.name] = TeSA.from_mask(mask, format=target.parameter.dtype)
        return Spec(found)

    # ------------------------------------------------------------------ stages

    def _stage(self, number: int, stage: Stage) -> list[LayerLog]:
        """Prune one stage, or take it from a checkpoint; a block that may leave memory is run once more before."""
        done = None if self.checkpoint is None else self.checkpoint.load(number, stage.targets)
        masks, logs = done or self._prune(stage)
        if done is None and self.checkpoint is not None and self.team.rank == 0:
            self.checkpoint.save(number, stage.targets, masks, logs)
        self.team.wait()
        self.masks |= {name: (pack_bits(mask.cpu()), mask.shape[-1]) for name, mask in masks.items()}
        if self.offload is not None and stage.block is not None and self.chain is not None and done is None:
            while self.chain.position <= stage.block:
                self.chain.advance()
        return logs

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
        if self.chain is not None:
            self.chain.store = Spill if self.spill else list
            if self.offload is not None:
                self.chain.keeping = self.offload.keeping
        return stages, unused

    @contextlib.contextmanager
    def _present(self, stage: Stage) -> Iterator[None]:
        """Hold the weights of a stage in memory, and write them back after it."""
        if self.offload is None:
            yield
        else:
            with self.offload.holding(stage.targets, writes=self.team.rank == 0):
                yield

    def _prune(self, stage: Stage) -> tuple[dict[str, Tensor], list[LayerLog]]:
        started = time.perf_counter()
        self.shared.clear()  # of the stage before, whose matrices are gone
        grams, wanted = self._calibrate(stage, self.batches or [])
        owners = self._added(stage, grams)
        dense = {target.name: target.parameter.detach().clone() for target in stage.targets if wanted is not None}
        calibrated = (time.perf_counter() - started) / len(stage.targets)
        masks: dict[str, Tensor] = {}
        logs: list[LayerLog] = []
        for target in stage.targets:
            started = time.perf_counter()
            masks[target.name], log = self._owned(target, grams, owners[target.name])
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

    # ------------------------------------------------------------------ calibration

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

    def _added(self, stage: Stage, grams: Grams) -> dict[str, int]:
        """Add up the Gram matrices of all processes, each at its owner; return the owner of each layer."""
        owners: dict[str, int] = {}
        if self.batches is None or self.team.size == 1:
            return dict.fromkeys((target.name for target in stage.targets), 0)
        seen: dict[int, int] = {}
        for target in stage.targets:
            if target.name not in grams.sums:  # the others' batches may reach it
                size = (target.layout.groups, target.layout.columns, target.layout.columns)
                grams.sums[target.name] = torch.zeros(size, dtype=torch.float64, device=target.parameter.device)
            gram = grams.sums[target.name]
            if id(gram) not in seen:
                seen[id(gram)] = len(seen) % self.team.size
                self.team.added(gram, seen[id(gram)])
            owners[target.name] = seen[id(gram)]
        return owners

    # ------------------------------------------------------------------ one layer

    def _owned(self, target: Target, grams: Grams, owner: int) -> tuple[Tensor, LayerLog]:
        """Prune one layer where it is owned, and give the result to all."""
        device = target.parameter.device
        if self.team.size == 1:
            return self._prune_layer(target, grams[target.name])
        mask = torch.zeros_like(target.parameter, dtype=torch.bool)
        numbers = torch.zeros(3, dtype=torch.float64, device=device)
        log = LayerLog(target.name, str(self.patterns[target.name]), 0.0, None, None, 0.0)
        if self.team.rank == owner:
            try:
                mask, log = self._prune_layer(target, grams[target.name])
            except SpartaError as error:
                self.team.agreed(str(error), owner, device)
                raise
            numbers.copy_(torch.tensor([log.density, log.error_before or 0.0, log.error or 0.0], dtype=torch.float64))
        self.team.agreed("", owner, device)
        bits = mask.to(torch.uint8)
        self.team.sent([target.parameter.data, bits, numbers], owner)
        density, before, reached = numbers.tolist()
        return bits.bool(), replace(log, density=density, error_before=before, error=reached)

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


def _blocks(model: nn.Module, targets: Sequence[Target]) -> list[nn.Module]:
    """Return the children of the container that holds most of the weights."""
    owned = {id(target.module): target.parameter.numel() for target in targets}
    best: tuple[int, list[nn.Module]] = (0, [])
    for module in model.modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1:
            size = sum(owned.get(id(m), 0) for child in module.children() for m in child.modules())
            if size > best[0]:
                best = (size, list(module.children()))
    return best[1]
