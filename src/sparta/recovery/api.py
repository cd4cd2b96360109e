"""`recover`: a pruned model learns back from its dense self what it lost, in one call.

Blocks are reconstructed one after the other, then the outputs of the whole model are distilled. The zeros of the spec
are held all the time, a stage that does not help is undone, and a run with a checkpoint folder can be killed and goes
on.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from sparta.common.progress import Progress, Step, many_view
from sparta.create.distill.losses import heads_of, kind_of_output, output_loss
from sparta.errors import ArgumentError, FileFormatError, ValueRangeError, message
from sparta.modules import unwrapped
from sparta.oneshot.calibrate import call, listed, moved, quiet
from sparta.recovery.blocks import chains_of, train_block
from sparta.recovery.log import RecoveryLog, StageLog
from sparta.recovery.lora import Adapters, add_lora, live_masks
from sparta.recovery.resume import Checkpoint, question_of
from sparta.recovery.training import Trained, mean_loss, only_these_train, order_of_batches
from sparta.tesa import names
from sparta.tesa.spec import Spec

__all__ = ["recover"]

_SAVE_EVERY = 50  # steps between two checkpoints


def recover(  # noqa: PLR0913 - one verb, and all but four of its arguments by name
    model: nn.Module,
    teacher: nn.Module,
    data: Iterable[Any],
    spec: Spec | None = None,
    *,
    steps: int = 200,
    block_steps: int = 64,
    block_batches: int = 16,
    lr: float = 3e-3,
    temperature: float = 1.0,
    rank: int | None = None,
    include: Sequence[str] | str | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: Progress | bool | None = None,
    seed: int = 0,
) -> RecoveryLog:
    """Train a pruned model, in place, to give what its dense self gives; its zeros stay.

    Parameters
    ----------
    model
        The pruned model. It is trained in eval mode: without dropout, with the statistics that its norms have.
    teacher
        The model as it was before pruning, or another one with the same outputs.
    data
        Batches as the model takes them: tensors, tuples of arguments or dicts of keyword arguments; no labels are
        needed. Any iterable, also an endless one: as many batches as there are steps are read, and kept.
    spec
        Where the zeros are; by default those that the model has.
    steps
        Of the training of the whole model towards the teacher's outputs; one batch each.
    block_steps, block_batches
        Steps per block, and the number of batches whose hidden states are kept for them; 0 steps leave blocks out.
    lr
        Step size as a share of the mean size of a weight; it rises, then falls to zero.
    temperature
        Of the softmax by which distributions are compared. Unit vectors are compared by angle, single numbers by
        their squared difference.
    rank
        If given, masked low-rank adapters of this rank are trained instead of the weights, and merged in the end.
    include
        Names of parameters to train, globs or ``re:`` patterns; by default those of the spec, and all biases and
        norms.
    checkpoint
        A folder. A run that was killed goes on from there, with the same result.
    progress
        A callable that gets a :class:`~sparta.common.progress.Step` per stage; True for lines on stderr; None for a
        view in a terminal only.
    seed
        Of the order of the batches and of the adapters' first values.

    Returns
    -------
    RecoveryLog
        The loss of each stage, before and after.

    Examples
    --------
    >>> from copy import deepcopy
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    >>> teacher = deepcopy(model)
    >>> spec = Spec.from_pattern(model, "2:4")
    >>> spec.apply(model)
    >>> log = recover(model, teacher, [torch.randn(32, 16)], spec, steps=20)
    >>> log.stages[-1].after < log.stages[-1].before
    True
    >>> spec.check(model)
    """
    _check_models(model, teacher)
    counts = {"steps": steps, "block_steps": block_steps, "block_batches": block_batches}
    _check_numbers(counts, lr, temperature)
    model, teacher = unwrapped(model), unwrapped(teacher)
    spec = Spec.from_zeros(model) if spec is None else spec
    live = live_masks(model, spec)
    if not live:
        raise ValueRangeError(message("the model has no zeros", "a pruned model", "prune it first, or pass the spec"))
    home = next(model.parameters()).device
    teachers_home = next((parameter.device for parameter in teacher.parameters()), home)
    batches = [moved(batch, home) for batch in _read(data, max(steps, block_batches if block_steps else 0, 1))]
    settings = {**counts, "lr": lr, "temperature": temperature, "rank": rank, "include": include, "seed": seed,
                "spec": sorted((name, tesa.digest) for name, tesa in spec.items())}  # fmt: skip
    question = "" if checkpoint is None else question_of(model, teacher, batches, settings)
    adapters = None if rank is None else add_lora(model, spec, rank=rank, include=include, seed=seed)
    try:
        teacher.to(home)
        parameters = _trained_of(model, live, include) if adapters is None else adapters.named_parameters()
        run = _Run(model, teacher, batches, parameters, live if adapters is None else {}, settings,
                   Checkpoint(checkpoint, question))  # fmt: skip
        with ExitStack() as stack:
            for one in (model, teacher):
                stack.enter_context(quiet(one))
            log = run.go(progress)
    except BaseException:
        if adapters is not None:
            adapters.remove()
        raise
    finally:
        teacher.to(teachers_home)
    _finish(model, spec, adapters)
    return log


def _finish(model: nn.Module, spec: Spec, adapters: Adapters | None) -> None:
    if adapters is not None:
        adapters.merge()
    spec.check(model)


class _Run:
    """One recovery: its parts, what is trained and how far it is."""

    def __init__(
        self,
        model: nn.Module,
        teacher: nn.Module,
        batches: list[Any],
        parameters: dict[str, nn.Parameter],
        live: Mapping[str, Tensor],
        settings: Mapping[str, Any],
        checkpoint: Checkpoint,
    ) -> None:
        self.model, self.teacher, self.batches, self.checkpoint = model, teacher, batches, checkpoint
        self.parameters, self.live, self.settings = parameters, live, settings
        self.log = RecoveryLog()

    def go(self, progress: Progress | bool | None) -> RecoveryLog:  # noqa: FBT001
        self._blocks(progress)
        self._outputs(progress)
        return self.log

    def _blocks(self, progress: Progress | bool | None) -> None:  # noqa: FBT001
        steps, lr, seed = (self.settings[key] for key in ("block_steps", "lr", "seed"))
        if not steps:
            return
        saved = self.checkpoint.load("blocks")
        done = 0
        if saved is not None:
            done, values, self.log, _ = saved
            self._put(values)
        chains = chains_of(self.model, self.teacher, self.batches[: self.settings["block_batches"]])
        if chains is None:
            self.log.note = "no chain of blocks was found: the outputs of the whole model were trained alone"
            return
        ours, theirs = chains
        with many_view(progress, len(ours.blocks)) as view:
            for number in range(len(ours.blocks)):
                if number < done:  # finished before: only its outputs are needed
                    with torch.no_grad():
                        ours.advance()
                        theirs.advance()
                    continue
                stage = train_block(ours, theirs, self.parameters, self.live, (steps, lr, seed))
                self.log.stages.append(stage)
                self.checkpoint.save("blocks", number + 1, self.parameters, self.log)
                view.done(Step(stage.name, f"{stage.before:.4g} -> {stage.after:.4g}"))

    def _outputs(self, progress: Progress | bool | None) -> None:  # noqa: FBT001
        steps, lr, seed = (self.settings[key] for key in ("steps", "lr", "seed"))
        if not steps:
            return
        started, count = time.perf_counter(), len(self.batches)
        loss_of = _output_loss(self.model, self.teacher, self.batches, self.settings["temperature"])
        trained = Trained(self.parameters, self.live, lr, steps)
        start, first = trained.values(), 0
        saved = self.checkpoint.load("outputs")
        if saved is None:
            before = mean_loss(loss_of, count)
        else:
            first, state, self.log, before = saved
            with _fitting(self.checkpoint):
                trained.load_state(state)
        with only_these_train([self.model], self.parameters), many_view(progress, 1) as view:
            for step in range(first, steps):
                trained.step(step, loss_of(order_of_batches(count, step, seed)))
                if (step + 1) % _SAVE_EVERY == 0 or step + 1 == steps:
                    self.checkpoint.save("outputs", step + 1, trained.state(), self.log, before)
            trained.clear()
            after = mean_loss(loss_of, count)
            if not after < before:  # also where it is NaN
                trained.set_values(start)
                after = before
            self.log.stages.append(StageLog("outputs", before, after, steps, time.perf_counter() - started))
            view.done(Step("outputs", f"{before:.4g} -> {after:.4g}"))

    def _put(self, values: Mapping[str, Tensor]) -> None:
        with _fitting(self.checkpoint), torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(values[name])


class _fitting:  # noqa: N801 - reads as a clause
    """Turn what does not fit in a checkpoint into an error that names its folder."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.folder = checkpoint.folder

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, KeyError | RuntimeError):
            given = f"what {self.folder} holds does not fit the model"
            raise FileFormatError(message(given, fix="use an empty folder")) from error


def _output_loss(
    model: nn.Module, teacher: nn.Module, batches: Sequence[Any], temperature: float
) -> Callable[[int], Tensor]:
    """Return the loss of a batch: how far the model's outputs are from the teacher's, where they are not padding."""

    def loss_of(index: int) -> Tensor:
        batch = batches[index]
        with torch.no_grad():
            theirs = heads_of(call(teacher, batch, index))
        ours = heads_of(call(model, batch, index))
        common = [key for key in theirs if key in ours]
        if not common:
            given = f"outputs {list(ours)} of the model and {list(theirs)} of the teacher"
            raise ValueRangeError(message(given, "outputs of the same names"))
        losses = []
        for key in common:
            goal, found = _without_padding(batch, theirs[key]), _without_padding(batch, ours[key])
            losses.append(output_loss(kind_of_output(goal), found, goal, temperature))
        return torch.stack(losses).mean()

    return loss_of


def _without_padding(batch: Any, head: Tensor) -> Tensor:
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if isinstance(mask, Tensor) and mask.shape == head.shape[:-1] and bool(mask.any()):
        return head[mask.bool()]
    return head


def _trained_of(
    model: nn.Module, live: Mapping[str, Tensor], include: Sequence[str] | str | None
) -> dict[str, nn.Parameter]:
    """Return what is trained by its name without wrappers; a shared parameter once."""
    every = {n: p for n, p in model.named_parameters() if p.is_floating_point()}
    usual = [name for name, parameter in every.items() if names.canonical(name) in live or parameter.dim() < 2]
    chosen = usual if include is None else names.select(every, include, None)
    if not chosen:
        raise ValueRangeError(message(f"include={include!r} leaves nothing to train", "names of parameters, or None"))
    return {names.canonical(name): every[name] for name in chosen}


def _read(data: Iterable[Any], most: int) -> list[Any]:
    """Return the first batches of any iterable."""
    if isinstance(data, Iterable) and not isinstance(data, Tensor | Mapping | str):
        return listed(itertools.islice(iter(data), most))
    return listed(data)  # which says what is wrong with it


def _check_models(model: nn.Module, teacher: nn.Module) -> None:
    for what, given in (("model", model), ("teacher", teacher)):
        if not isinstance(given, nn.Module):
            raise ArgumentError(message(f"the {what} is a {type(given).__name__}", "a torch.nn.Module"))
    shared = {id(parameter) for parameter in model.parameters()}
    if not shared:
        raise ValueRangeError(message("the model has no parameters", fix="pass the pruned model"))
    if any(id(parameter) in shared for parameter in teacher.parameters()):
        said = "the teacher shares weights with the model"
        raise ValueRangeError(message(said, "a model of its own", "copy.deepcopy the model before it is pruned"))


def _check_numbers(counts: Mapping[str, int], lr: float, temperature: float) -> None:
    for name, value in counts.items():
        least = 1 if name == "block_batches" else 0
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
            raise ValueRangeError(message(f"{name} is {value!r}", f"a number from {least} on"))
    for name, rate in (("lr", lr), ("temperature", temperature)):
        is_number = isinstance(rate, int | float) and not isinstance(rate, bool)
        if not is_number or not math.isfinite(rate) or rate <= 0:
            raise ValueRangeError(message(f"{name} is {rate!r}", "a positive number"))
