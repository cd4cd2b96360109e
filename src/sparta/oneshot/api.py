"""`prune`: one verb after training, with or without data.

Arguments are checked here before anything runs; :mod:`sparta.oneshot.run` then goes through the model in the order in
which it computes. The spec that comes back says where the zeros are; the log says what they cost.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from sparta.common.progress import Progress
from sparta.errors import NameNotFoundError, ValueRangeError, did_you_mean, message
from sparta.oneshot.budget import counts_of, patterns_of
from sparta.oneshot.calibrate import listed, moved, quiet
from sparta.oneshot.log import PruneLog
from sparta.oneshot.methods import Method, find_method
from sparta.oneshot.offload import Offload, memory_bytes
from sparta.oneshot.resume import Checkpoint, fingerprint
from sparta.oneshot.run import Run
from sparta.oneshot.shards import Shards
from sparta.oneshot.targets import find_targets
from sparta.oneshot.team import Team
from sparta.sparsify.allocation import Allocation
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
    memory: float | str | None = None,
    weights: str | os.PathLike[str] | None = None,
    output: str | os.PathLike[str] | None = None,
    device: torch.device | str | None = None,
    progress: Progress | bool | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
) -> tuple[Spec, PruneLog]:
    """Prune a trained model at once, in place.

    Where `torch.distributed` is initialized, every process calls it with the same model and data, calibrates on its
    part of the batches and gets the same result.

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
    memory
        Bytes, or a text such as ``"2 GiB"``, that weights and Gram matrices may take at a time; hidden states then go
        to temporary files. A block that needs more is an error that says how much.
    weights, output
        For a model larger than memory, made inside :func:`empty_weights`: the folder of safetensors files that its
        parameters are read from, block by block, and the folder that the pruned model is written to.
    device
        Where to compute; the model goes back to where it was. None: where it is.
    progress
        A callable that gets a :class:`~sparta.common.progress.Step` for each stage that is done, with its layers' log
        as the outcome; True for lines on stderr; None for a view in a terminal only.
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
    chosen = _method(method, data, refine)
    team = Team.current()
    if refine is not None and team.size > 1:
        raise ValueRangeError(message(f"refine={refine!r} in {team.size} processes", "one process", "leave it out"))
    targets = find_targets(model, include, ignore)
    patterns = patterns_of(targets, pattern)
    targets = [target for target in targets if target.name in patterns]
    counts = counts_of(targets, patterns, sparsity, allocation)
    home = next(model.parameters()).device
    cap = None if memory is None else memory_bytes(memory)
    offload = _offload(model, weights, output, cap, device)
    if device is not None and offload is None:
        model.to(device)
    where = next(model.parameters()).device if offload is None else offload.device
    batches = None if data is None else [moved(batch, where) for batch in team.part(listed(data))]
    run = Run(model, batches, chosen, patterns, counts, refine is not None, team, offload, spill=cap is not None)
    if checkpoint is not None:
        settings = f"{chosen.name} {sorted((k, str(v)) for k, v in patterns.items())} {sorted(counts.items())} {refine}"
        if offload is not None:
            settings += offload.shards.fingerprint()
        run.checkpoint = Checkpoint(checkpoint, fingerprint([] if offload else targets, batches or [], settings))
    started = time.perf_counter()
    try:
        with quiet(model):
            run.go(targets, progress)
    finally:
        if offload is not None:
            offload.detach()
        elif device is not None:
            model.to(home)
    run.log.seconds = time.perf_counter() - started
    if offload is not None and team.rank == 0:
        offload.shards.finish()
    team.wait()
    return run.spec(targets, where if offload is not None else home), run.log


def _method(method: str, data: object, refine: str | None) -> Method:
    """Return the method, after checking that it has what it needs."""
    if refine not in {None, "block"}:
        raise NameNotFoundError(did_you_mean(str(refine), ["block"], "refinement"))
    chosen = find_method(("magnitude" if data is None else "alps") if method == "auto" else method)
    if data is None and (chosen.needs_data or refine):
        raise ValueRangeError(
            message(f"{f'method {chosen.name!r}' if chosen.needs_data else 'refine'} without data", fix="pass `data`")
        )
    return chosen


def _offload(
    model: nn.Module,
    weights: str | os.PathLike[str] | None,
    output: str | os.PathLike[str] | None,
    cap: int | None,
    device: torch.device | str | None,
) -> Offload | None:
    """Return where the weights of a model larger than memory come from; None for a model that is there."""
    empty = any(parameter.is_meta for parameter in model.parameters())
    if (weights is None) != (output is None) or (empty and weights is None):
        raise ValueRangeError(
            message(
                "a model without values" if empty else "one of `weights` and `output` without the other",
                "`weights` and `output`, the folders to read from and to write to",
            )
        )
    if weights is None or output is None:
        return None
    if not all(parameter.is_meta for parameter in model.parameters()):
        raise ValueRangeError(
            message("`weights` for a model that has values", fix="make it inside `sparta.oneshot.empty_weights()`")
        )
    place = torch.device("cpu") if device is None else torch.device(device)
    return Offload(model, Shards(weights, output), cap, place)
