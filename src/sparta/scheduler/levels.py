"""The level scheduler: one retraining in levels of rising sparsity, with the learning rate restarted at each.

How sparse each layer is at each level is decided once, by an open criterion: every layer loses the same share of its
energy (its sum of squares), less in early stages and in depthwise convolutions. `prune_model` is called after each
optimizer step with its number, and everything happens at level boundaries, ``n * total_iterations // levels``.
"""

from __future__ import annotations

import csv
import io
import logging
import math
import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sparta.errors import ValueRangeError, message
from sparta.files import save_tensors, write_atomic
from sparta.scheduler.base import BaseScheduler, Exported, Setup, check_iteration, take_config
from sparta.scheduler.fake_sparse import FakeSparse
from sparta.scheduler.hardware import Device, device_of
from sparta.scheduler.level_table import LevelTable
from sparta.scheduler.lr_restart import LRRestart
from sparta.scheduler.prepared import PreparedLayer, plain_state_dict
from sparta.scheduler.registry import register_scheduler
from sparta.scheduler.statistics import LayerStatistics, example_input, measure_layers
from sparta.sparsify import Candidate, Energy, level_starts
from sparta.spelling import also
from sparta.tesa import names
from sparta.tesa.mask import as_mask
from sparta.tesa.select import check_sparsity

__all__ = ["AmbaLevelPruneScheduler"]

_LOG = logging.getLogger("sparta.scheduler")
_LEVELS = (30, 40, 50, 60, 70, 80, 90)  # percent, as the document has them
_DECAY = 0.7  # how much less a stage loses than the one after it, at a tuning of 1; fits published ResNet-18 profiles


@register_scheduler("AmbaLevelPruneScheduler")
class AmbaLevelPruneScheduler(BaseScheduler):
    """Prunes in levels over one retraining.

    Parameters
    ----------
    setup
        The rest of the configuration.
    total_iterations
        Number of training iterations of the whole retraining; the documents call it ``total_iters``.
    sparsity_table
        Sparsity of each level in percent: rising, each in [0, 100). None: 30, 40 and so on up to the target.
    target_sparsity
        Sparsity of the last level, as a fraction; 0.9 where neither it nor a table is given.
    no_prune_keyword, no_prune_layer
        Layers that stay dense: whose name contains a keyword; whose name is exactly this.
    prun_algo
        0: each layer gets the level's sparsity. 1: energy levels, and the network as a whole gets it, also when some
        layers stay dense.
    prun_algo_tuning
        How much less early stages are pruned than late ones; 0 is not at all. Only with `prun_algo` 1.
    prun_hw_aware
        A device preset, or a dictionary of its fields: no layer is pruned beyond what its roofline says can gain.
    dw_no_prune
        Convolutions with groups stay dense.
    do_sparse_analysis
        True: always decide again. False: use the table in `output_dir` when there is one that fits.
    output_dir
        Folder for the table and the report. None: written nowhere.
    save_dir
        Folder for one checkpoint per level. None: none are written.
    sparse_rate_tolerance
        Limits may keep a level from being reached; a gap beyond this is warned of.
    default_input_shape, default_input_custom
        An example input: its shape with the batch first, or the input itself. Without one there are no MAC statistics
        and all stages count alike.
    lr_scheduler, init_lr
        As :meth:`set_lr_scheduler` takes them.
    mask_dict
        Masks to begin with, by layer name.
    prune_tolerance_max, prune_tolerance_min
        Limits of a layer beside the level t: at most ``t * max`` (if above 1), at most ``1 - (1 - t) * min`` (below 1).
    verbose
        Log the tables at level INFO.

    Examples
    --------
    >>> scheduler = AmbaLevelPruneScheduler(
    ...     total_iterations=4, sparsity_table=[50, 75], output_dir=None, save_dir=None, prun_algo=0
    ... )
    >>> model = scheduler.prepare_sparse_model(nn.Linear(8, 4))
    >>> rates = []
    >>> for iteration in range(4):
    ...     scheduler.prune_model(model, iteration)
    ...     rates.append(scheduler.compute_sparse_rate(model))
    >>> rates
    [0.5, 0.5, 0.75, 0.75]
    """

    @also(total_iters="total_iterations", max_iters="total_iterations")
    def __init__(  # noqa: PLR0913, PLR0917 - the document's
        self,
        setup: Setup | None = None,
        total_iterations: int = 10000,
        sparsity_table: Sequence[float] | None = None,
        no_prune_keyword: str | Sequence[str] = "",
        no_prune_layer: str | Sequence[str] = "",
        prun_algo: int = 1,
        prun_algo_tuning: float = 0.5,
        prun_hw_aware: str | dict[str, Any] | Device = "",
        dw_no_prune: bool = False,  # noqa: FBT001, FBT002 - the document's
        do_sparse_analysis: bool = True,  # noqa: FBT001, FBT002
        output_dir: str | Path | None = "./sparse_analysis",
        save_dir: str | Path | None = "./model_save_path",
        sparse_rate_tolerance: float = 0.015,
        default_input_shape: Sequence[int] | None = None,
        default_input_custom: Any = None,
        lr_scheduler: Any = None,
        init_lr: float | Sequence[float] | None = None,
        mask_dict: Mapping[str, Any] | None = None,
        prune_tolerance_max: float = 1.0,
        prune_tolerance_min: float = 1.0,
        verbose: bool = False,  # noqa: FBT001, FBT002
        target_sparsity: float | None = None,
    ) -> None:
        super().__init__(setup, no_prune_keyword, no_prune_layer)
        self.levels = _checked_levels(_table(sparsity_table, target_sparsity), total_iterations)
        self.total_iterations = total_iterations
        if prun_algo not in {0, 1}:
            raise ValueRangeError(message(f"prun_algo is {prun_algo}", "0 (uniform) or 1 (energy levels)"))
        if prun_algo_tuning < 0 or prune_tolerance_max < 1 or not 0 <= prune_tolerance_min <= 1:
            raise ValueRangeError(
                message(
                    f"prun_algo_tuning {prun_algo_tuning}, prune_tolerance_max {prune_tolerance_max}, "
                    f"prune_tolerance_min {prune_tolerance_min}",
                    "0 or more, 1 or more, 0 to 1",
                )
            )
        self.prun_algo, self.prun_algo_tuning, self.dw_no_prune = prun_algo, prun_algo_tuning, dw_no_prune
        self.device = device_of(prun_hw_aware) if prun_hw_aware else None
        self.do_sparse_analysis = do_sparse_analysis
        self.output_dir = None if output_dir is None else Path(output_dir)
        self.save_dir = None if save_dir is None else Path(save_dir)
        self.sparse_rate_tolerance = sparse_rate_tolerance
        self._example = (default_input_shape, default_input_custom)
        self._init_lr, self._mask_dict = init_lr, mask_dict
        self._limits = (prune_tolerance_max, prune_tolerance_min)
        self._verbose = verbose
        self._restart = None if lr_scheduler is None else LRRestart(lr_scheduler, init_lr)
        self._table: LevelTable | None = None
        self._statistics: dict[str, LayerStatistics] = {}
        self._level, self._finished = -1, -1
        self._report: list[list[Any]] = []

    def prepare_sparse_model(self, model: nn.Module, config: Mapping[str, Any] | None = None) -> nn.Module:
        """Make the weights fake-sparse; see :meth:`BaseScheduler.prepare_sparse_model`."""
        take_config(self, config)
        if not isinstance(self.setup.fake_sparse(torch.zeros(1, 1)), FakeSparse):
            raise ValueRangeError(message("a level scheduler with learnt masks", "the fake_sparse FakeSparse"))
        super().prepare_sparse_model(model)
        if self._mask_dict is not None:
            known = {p.layer.module_name: p for p in self._pruned()} | {p.name: p for p in self._pruned()}
            for given, mask in self._mask_dict.items():
                prepared = known[names.resolve(given, known)[0]]
                prepared.fake.set_mask(as_mask(mask).to(prepared.weight.device), prepared.weight.detach())  # type: ignore[union-attr, operator]
        return model

    def set_lr_scheduler(self, lr_scheduler: Any) -> None:
        """Restart this learning-rate schedule at each level after the first; pass it as new."""
        self._check_prepared()
        restart = LRRestart(lr_scheduler, self._init_lr)
        self._check_optimizer(lr_scheduler.optimizer)
        self._restart = restart

    # ------------------------------------------------------------------ training

    def prune_model(self, model: nn.Module, iteration: int, curr_input_shape: Sequence[int] | None = None) -> None:
        """Do what is due after optimizer step `iteration` (from 0): begin a level, end one, or nothing.

        Parameters
        ----------
        curr_input_shape
            Shape of an input, at the first call, when the scheduler was given no example input.
        """
        self._check_prepared(model)
        check_iteration(iteration)
        if iteration >= self.total_iterations:
            raise ValueRangeError(
                message(f"iteration is {iteration}", f"0 to {self.total_iterations - 1}, total_iterations - 1")
            )
        if not self._statistics:
            self._measure(model, curr_input_shape)
        starts = level_starts(self.total_iterations, len(self.levels))
        level = sum(start <= iteration for start in starts) - 1
        if level > self._level:
            if self._level >= 0 and self._finished < self._level:
                self._finish_level(model)
            self._begin_level(level)
            if self.loggers:
                self.log({"sparsity": self.compute_sparse_rate(model), "level": float(level)}, iteration)
            if iteration > 0 and self._restart is not None:
                self._restart()
        if iteration + 1 >= ([*starts, self.total_iterations])[level + 1] and self._finished < level:
            self._finish_level(model)

    def get_prune_step(self) -> int:
        """Return the iteration at which the present level began; 0 before the first."""
        return level_starts(self.total_iterations, len(self.levels))[max(0, self._level)]

    get_last_prune_step = get_prune_step

    @property
    def table(self) -> LevelTable:
        """The sparsities of the layers at the levels; decided at the first :meth:`prune_model`."""
        if self._table is None:
            raise ValueRangeError(message("nothing is analysed yet", fix="call `prune_model` once"))
        return self._table

    def _begin_level(self, level: int) -> None:
        self._level = level
        for prepared in self._pruned():
            self._set_sparsity(prepared, self.table.layers[prepared.name][level])

    def _finish_level(self, model: nn.Module) -> None:
        """Zero the pruned weights for good, and write the checkpoint and the report."""
        self._finished = self._level
        for prepared in self._pruned():
            prepared.store(prepared.effective)
        self._add_to_report()
        state = plain_state_dict(model, self._layers) if self.save_dir is not None else {}
        rate = self.compute_sparse_rate(model)
        if not _is_main_process():
            return
        percent = f"{100 * self.levels[self._level]:g}"
        if self.save_dir is not None:
            self.save_dir.mkdir(parents=True, exist_ok=True)
            payload = {
                "level": self._level,
                "prune_step": self.get_prune_step(),
                "sparse_rate": rate,
                "table": self.table.to_dict(),
            }
            file = self.save_dir / f"global_sparse_rate_{percent}.safetensors"
            save_tensors(file, "checkpoint", 1, state, payload)
        if self.output_dir is not None:
            self.output_dir.mkdir(parents=True, exist_ok=True)
            text = io.StringIO()
            writer = csv.writer(text, lineterminator="\n")
            writer.writerow(["level", "layer", "weights", "live", "sparsity", "macs", "macs_left"])
            writer.writerows(self._report)
            write_atomic(self.output_dir / "pruner_report.csv", text.getvalue().encode())

    def _add_to_report(self) -> None:
        totals = [0, 0, 0, 0]
        for prepared in self._layers:
            size, live = prepared.weight.numel(), int(torch.count_nonzero(prepared.effective))
            macs = self._statistics[prepared.name].macs
            left = round(macs * live / max(1, size))
            row = [size, live, macs, left]
            totals = [a + b for a, b in zip(totals, row, strict=True)]
            self._report.append(
                [self.levels[self._level], prepared.name, size, live, 1 - live / max(1, size), macs, left]
            )
        size, live, macs, left = totals
        self._report.append([self.levels[self._level], "network", size, live, 1 - live / max(1, size), macs, left])

    # ------------------------------------------------------------------ deciding

    def _measure(self, model: nn.Module, input_shape: Sequence[int] | None) -> None:
        """Run the statistics and find or make the table, at the first call."""
        device = self._layers[0].weight.device
        given, custom = self._example
        example = example_input(input_shape if given is None else given, custom, device)
        self._statistics = measure_layers(model, self._layers, example)
        if self._table is not None:  # resumed
            return
        sizes = {prepared.name: prepared.weight.numel() for prepared in self._layers}
        if not self.do_sparse_analysis and self.output_dir and (self.output_dir / "level_table.json").exists():
            found = LevelTable.load(self.output_dir)
            if found.fits(self.levels, sizes):
                self._table = found
                return
            text = f"the table in {self.output_dir} is of another model or other levels"
            warnings.warn(message(text, fix="it is made again"), stacklevel=3)
        self._table = self._analyze(sizes)
        if self._verbose:
            _LOG.info("\n%s", self._table)
        if self.output_dir is not None and _is_main_process():
            self.output_dir.mkdir(parents=True, exist_ok=True)
            self._table.save(self.output_dir)

    def _analyze(self, sizes: Mapping[str, int]) -> LevelTable:
        total = sum(sizes.values())
        scores = {p.name: p.value.abs().flatten() for p in self._layers}
        columns, achieved = [], []
        for level in self.levels:
            candidates = [
                Candidate(p.name, p.layer.shape, sizes[p.name], scores[p.name], limit=self._limit(p, level))
                for p in self._layers
            ]
            if self.prun_algo == 0:
                rates = {c.name: min(level, c.limit) for c in candidates}
                counts = [min(round(rates[c.name] * c.units), c.most(1.0, level)) for c in candidates]
            else:
                reachable = sum(c.most(1.0, level) for c in candidates) / max(1, total)
                counts = Energy(share=self._shares()).counts(candidates, min(level, reachable))
            columns.append({c.name: count / max(1, c.units) for c, count in zip(candidates, counts, strict=True)})
            achieved.append(sum(counts) / max(1, total))
            self._warn_of_gap(level, achieved[-1] if self.prun_algo == 1 else _share_of_pruned(candidates, counts))
        layers = {name: tuple(column[name] for column in columns) for name in sizes}
        return LevelTable(self.levels, tuple(achieved), layers, dict(sizes))

    def _warn_of_gap(self, level: float, achieved: float) -> None:
        if level - achieved > self.sparse_rate_tolerance:
            text = f"level {level:.0%} comes to {achieved:.1%}: the layers that may be pruned have no room for more"
            warnings.warn(message(text, fix="leave fewer layers out, or lower the level"), stacklevel=5)

    def _limit(self, prepared: PreparedLayer, level: float) -> float:
        """Return the largest sparsity of a layer at a level."""
        statistics = self._statistics[prepared.name]
        if prepared.fake is None or (self.dw_no_prune and statistics.depthwise):
            return 0.0
        highest, lowest = self._limits
        limit = self.setup.mask_generator.max_sparsity(prepared.layer.shape, prepared.layer.input_axis)
        if highest > 1:
            limit = min(limit, level * highest)
        if lowest < 1:
            limit = min(limit, 1 - (1 - level) * lowest)
        if self.device is not None and statistics.group is not None:
            limit = min(limit, self.device.useful_sparsity(statistics.macs, statistics.moved))
        return limit

    def _shares(self) -> dict[str, float]:
        """Return how large a share of its energy each layer loses, beside the last stage's 1."""
        groups = [s.group for s in self._statistics.values() if s.group is not None]
        last = max(groups, default=0)
        return {
            name: 1.0
            if s.group is None
            else math.exp(-_DECAY * self.prun_algo_tuning * (last - s.group)) / (2 if s.depthwise else 1)
            for name, s in self._statistics.items()
        }

    # ------------------------------------------------------------------ exporting, resuming

    def export_sparse_model(self, model: nn.Module) -> Exported:
        """Bake and make plain modules; a last level that is still open is closed first."""
        self._check_prepared(model)
        if self._finished < self._level:
            self._finish_level(model)
        return super().export_sparse_model(model)

    def state_dict(self) -> dict[str, Any]:
        """Return everything the rest of the run depends on, beside the model's and the optimizer's own states."""
        return {
            **super().state_dict(),
            "level": self._level,
            "finished": self._finished,
            "table": None if self._table is None else self._table.to_dict(),
            "report": [list(row) for row in self._report],
            "lr": None if self._restart is None else self._restart.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_dict` returned, after `prepare_sparse_model` and `set_lr_scheduler`."""
        super().load_state_dict(state)
        self._level, self._finished = int(state["level"]), int(state["finished"])
        self._table = None if state["table"] is None else LevelTable.from_dict(state["table"])
        self._report = [list(row) for row in state["report"]]
        if state["lr"] is not None:
            if self._restart is None:
                raise ValueRangeError(
                    message("the state restarts a learning rate", fix="call `set_lr_scheduler` before loading")
                )
            self._restart.load_state_dict(state["lr"])


def _share_of_pruned(candidates: Sequence[Candidate], counts: Sequence[int]) -> float:
    """Return the pruned fraction of the layers that may be pruned at all; 1 where there is none."""
    allowed = [(c.units, count) for c, count in zip(candidates, counts, strict=True) if c.limit > 0]
    return sum(count for _, count in allowed) / max(1, sum(units for units, _ in allowed)) if allowed else 1.0


def _table(percents: Sequence[float] | None, target: float | None) -> Sequence[float]:
    """Return the levels in percent, from a table or from the last of them."""
    if percents is not None:
        if target is not None:
            raise ValueRangeError(message("both sparsity_table and target_sparsity", "one of them"))
        return percents
    last = 100 * check_sparsity(0.9 if target is None else target)
    return [*(level for level in _LEVELS if level < last), last]


def _checked_levels(percents: Sequence[float], total_iterations: int) -> tuple[float, ...]:
    if not percents:
        raise ValueRangeError(message("sparsity_table is empty", "one level or more, in percent"))
    for percent in percents:
        if not 0 <= percent < 100:
            raise ValueRangeError(message(f"sparsity_table has the level {percent!r}", "percents in [0, 100)"))
    if any(later <= earlier for earlier, later in pairwise(percents)):
        raise ValueRangeError(message(f"sparsity_table is {list(percents)}", "rising levels"))
    if total_iterations < len(percents):
        given = f"total_iterations is {total_iterations} for {len(percents)} levels"
        raise ValueRangeError(message(given, "one iteration per level or more"))
    return tuple(float(percent) / 100 for percent in percents)


def _is_main_process() -> bool:
    import torch.distributed as dist

    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
