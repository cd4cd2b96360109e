"""`compare`: which kind of pruning keeps a model best, at which sparsity, over several seeds.

The training loop is the user's own function, called once per method, sparsity and seed with a stand-in for
:func:`~sparta.create.initialize.initialize` that has the method and the sparsity filled in. Zeros are counted in the
model that comes back, so the table says what was reached and not only what was asked for.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sparta.common.progress import Progress, Step, many_view
from sparta.create.initialize import initialize
from sparta.create.manager import Manager
from sparta.create.template import pruning_kind
from sparta.errors import ArgumentError, FileFormatError, SpartaError, ValueRangeError, message
from sparta.files import read_json_file, write_atomic
from sparta.sparsify import find_layers
from sparta.tables import table
from sparta.tesa.select import check_sparsity

__all__ = ["MethodComparison", "MethodResult", "compare"]

DENSE = "dense"


@dataclass(frozen=True)
class MethodResult:
    """One method at one sparsity.

    Parameters
    ----------
    asked, sparsity
        The sparsity that was asked for, and the mean of what was counted in all prunable weights of the models.
    scores
        What `evaluate` returned, one per seed.
    note
        Why it could not run, where it could not.
    """

    method: str
    asked: float
    sparsity: float
    scores: tuple[float, ...]
    note: str = ""

    @property
    def mean(self) -> float:
        """Mean of the scores."""
        return statistics.fmean(self.scores)

    @property
    def spread(self) -> float:
        """Standard deviation of the scores; 0 for a single one."""
        return statistics.stdev(self.scores) if len(self.scores) > 1 else 0.0


@dataclass
class MethodComparison:
    """All results; prints as a table."""

    results: list[MethodResult] = field(default_factory=list)

    def __iter__(self) -> Any:
        return iter(self.results)

    def __len__(self) -> int:
        return len(self.results)

    def to_dict(self) -> dict[str, Any]:
        """Return the results as plain values."""
        rows = [asdict(one) | {"scores": list(one.scores)} for one in self.results]
        return {"results": rows}

    def __str__(self) -> str:
        rows = [
            [one.method, one.asked, f"{one.sparsity:.4f}", f"{one.mean:.4g}", f"{one.spread:.2g}", len(one.scores), ""]
            if one.scores
            else [one.method, one.asked, None, None, None, 0, one.note]
            for one in self.results
        ]
        return table(["method", "asked", "sparsity", "mean", "spread", "seeds", "note"], rows)


def compare(
    methods: Sequence[str] | Mapping[str, str | bool | Mapping[str, Any] | None],
    sparsities: Sequence[float],
    train: Callable[..., nn.Module],
    evaluate: Callable[[nn.Module], float],
    seeds: int | Sequence[int] = 3,
    *,
    dense: bool = True,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: Progress | bool | None = None,
) -> MethodComparison:
    """Train with several methods, sparsities and seeds, and put the scores into one table.

    Parameters
    ----------
    methods
        Kinds of pruning (see `pruning` of :func:`~sparta.create.initialize.initialize`), or a mapping from a name of
        one's own to a kind or to arguments of `initialize`, such as ``{"pruning": "movement", "recipe_variables":
        {"allocation": "erk"}}``. With ``"recipe"`` among them, that recipe's ``pruning_final_sparsity`` is set.
    sparsities
        Fractions to prune.
    train
        Called as ``train(start, seed)``: makes model and optimizer, calls ``start(model, optimizer, steps_per_epoch,
        ...)`` once, which takes what `initialize` takes and returns what it returns, trains for
        ``manager.max_epochs`` epochs and returns the model.
    evaluate
        Returns the score of a model, a number.
    seeds
        How many, or which; `torch.manual_seed` is called with each, and the random state is put back afterwards.
    dense
        Whether the same training without pruning is compared too.
    checkpoint
        A file in which finished trainings are noted; a comparison that was killed goes on from there.
    progress
        A callable that gets a :class:`~sparta.common.progress.Step` per training; True for lines on stderr.

    Returns
    -------
    MethodComparison
        A method that refuses what was asked has its reason in the table. When all do, the first one's error is raised.

    Examples
    --------
    >>> def train(start, seed):
    ...     model = nn.Linear(8, 2)
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ...     manager, _ = start(model, optimizer, 2, recipe_variables={"num_epochs": 2})
    ...     for _ in range(2 * manager.max_epochs):
    ...         optimizer.zero_grad()
    ...         (model(torch.randn(4, 8)) - 1).square().mean().backward()
    ...         optimizer.step()
    ...     return model
    >>> result = compare(["magnitude", "rigl"], [0.5], train, lambda model: float(model.weight.abs().sum()), seeds=1)
    >>> [(one.method, one.sparsity) for one in result]
    [('dense', 0.0), ('magnitude', 0.5), ('rigl', 0.5)]
    """
    chosen = _methods(methods, dense=dense)
    levels, numbers = _levels(sparsities), _seeds(seeds)
    for what, given in (("train", train), ("evaluate", evaluate)):
        if not callable(given):
            raise ArgumentError(message(f"{what} is a {type(given).__name__}", "a function"))
    cells = [(m, level) for m in chosen for level in ((0.0,) if m == DENSE and dense else levels)]
    notebook = _Notebook(checkpoint)
    found, errors = MethodComparison(), []
    with many_view(progress, len(cells)) as view:
        for method, level in cells:
            pairs, note = [], ""
            try:
                for seed in numbers:
                    key = json.dumps([method, chosen[method], level, seed], default=str)
                    if key not in notebook.done:
                        notebook.add(key, _one(chosen[method], level, seed, train, evaluate))
                    pairs.append(notebook.done[key])
            except ArgumentError:  # of `train` or `evaluate`, not of the method
                raise
            except SpartaError as error:
                errors.append(error)
                pairs, note = [], str(error)
            zeros = statistics.fmean(pair[1] for pair in pairs) if pairs else 0.0
            result = MethodResult(method, level, zeros, tuple(pair[0] for pair in pairs), note)
            found.results.append(result)
            view.done(Step(f"{method} at {level:g}", note or f"{result.mean:.4g} ± {result.spread:.2g}"))
    if errors and not any(one.scores for one in found if not (one.method == DENSE and dense)):
        raise errors[0]
    return found


def _one(
    options: Mapping[str, Any],
    sparsity: float,
    seed: int,
    train: Callable[..., nn.Module],
    evaluate: Callable[[nn.Module], float],
) -> tuple[float, float]:
    """Return the score and the fraction of zeros of one training."""
    managers: list[Manager] = []

    def start(model: nn.Module, optimizer: Any, steps_per_epoch: int, **more: Any) -> tuple[Manager, Any]:
        given = {"quantization": False, "seed": seed, **more, **options}
        variables = dict(more.get("recipe_variables") or {}) | dict(options.get("recipe_variables") or {})
        if options.get("pruning", True) not in {False, "none", "constant"}:
            variables["pruning_final_sparsity" if "recipe" in given else "sparsity"] = sparsity
        given["recipe_variables"] = variables
        manager, returned = initialize(model, optimizer, steps_per_epoch, **given)
        managers.append(manager)
        return manager, returned

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = train(start, seed)
        if len(managers) != 1:
            given = f"train called start {len(managers)} times"
            raise ArgumentError(message(given, "once", "call start(model, optimizer, steps_per_epoch) in train"))
        if not isinstance(model, nn.Module):
            raise ArgumentError(message(f"train returned a {type(model).__name__}", "the trained torch.nn.Module"))
        managers[0].finalize()
        layers = find_layers(model)
        zeros = sum(int((layer.parameter == 0).sum()) for layer in layers)
        with torch.no_grad():
            score = evaluate(model)
    try:
        number = float(score)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(message(f"evaluate returned a {type(score).__name__}", "a number")) from error
    return number, zeros / sum(layer.parameter.numel() for layer in layers)


class _Notebook:
    """Finished trainings by method, sparsity and seed, in a file if there is one."""

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self.path = None if path is None else Path(path)
        self.done: dict[str, tuple[float, float]] = {}
        if self.path is not None and self.path.is_dir():
            raise FileFormatError(message(f"{self.path} is a folder", "the name of a file"))
        if self.path is not None and self.path.exists():
            stored = read_json_file(self.path)
            pairs = stored.get("trainings") if isinstance(stored, dict) else None
            if not isinstance(pairs, dict) or not all(_is_pair(pair) for pair in pairs.values()):
                given = f"{self.path} holds no comparison"
                raise FileFormatError(message(given, fix="name another file for a new one"))
            self.done = {key: (pair[0], pair[1]) for key, pair in pairs.items()}

    def add(self, key: str, pair: tuple[float, float]) -> None:
        self.done[key] = pair
        if self.path is not None:
            write_atomic(self.path, json.dumps({"trainings": self.done}, indent=1).encode())


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(one, int | float) for one in value)


def _methods(methods: object, *, dense: bool) -> dict[str, dict[str, Any]]:
    """Return the arguments of `initialize` by method."""
    if isinstance(methods, str) or not isinstance(methods, Sequence | Mapping) or not methods:
        given = f"methods is {methods!r:.60}"
        raise ArgumentError(message(given, "a list of kinds of pruning, or a mapping from names to arguments"))
    named = dict(methods) if isinstance(methods, Mapping) else {str(name): name for name in methods}
    found: dict[str, dict[str, Any]] = {DENSE: {"pruning": False}} if dense else {}
    for name, given in named.items():
        options = dict(given) if isinstance(given, Mapping) else {"pruning": given}
        if "recipe" not in options:
            options["pruning"] = pruning_kind(options.get("pruning", True))
        if name == DENSE and dense:
            raise ValueRangeError(message(f"a method named {name!r}", "another name", "dense=True has it already"))
        found[str(name)] = options
    return found


def _levels(sparsities: object) -> list[float]:
    if isinstance(sparsities, str) or not isinstance(sparsities, Sequence) or not sparsities:
        raise ArgumentError(message(f"sparsities is {sparsities!r:.60}", "a list of numbers in [0, 1)", "pass [0.9]"))
    return [check_sparsity(one) for one in sparsities]


def _seeds(seeds: object) -> list[int]:
    if isinstance(seeds, int) and not isinstance(seeds, bool) and 0 < seeds < 10_000:
        return list(range(seeds))
    if isinstance(seeds, Sequence) and not isinstance(seeds, str) and seeds and all(type(s) is int for s in seeds):
        return list(seeds)
    raise ValueRangeError(message(f"seeds is {seeds!r:.60}", "how many seeds, or a list of them"))
