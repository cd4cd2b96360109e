"""What is compared: every scheduler of the guide with its configuration, and how sparse it must come out.

The configurations are those of the guide, with this benchmark's numbers of iterations put in. :func:`expected_zeros`
says from the configuration alone how many zeros there must be, and the results are held to it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

LEVELS = (30, 40, 50, 60, 70, 80, 90)


@dataclass(frozen=True)
class Method:
    """One row of the comparison.

    Parameters
    ----------
    name
        What the tables call it.
    config
        For ``build_sparse_scheduler``; None is dense training.
    asked
        Sparsities in percent, one after the other; empty when it is learnt.
    budget
        What a sparsity is a share of: "network", "layer" (each alone), "filter" (each layer's), "n:m" (layers with
        whole groups), "2:4" (layers that the hardware takes); "" when nothing exact can be said.
    weight_decay, threshold_decay
        Of the weights, and of STR's thresholds, which are steered with it.
    recompute
        Whether masks are computed again in each epoch of the first half.
    """

    name: str
    config: Mapping[str, Any] | None
    asked: tuple[int, ...] = ()
    budget: str = ""
    weight_decay: float = 5e-4
    threshold_decay: float = 5e-4
    recompute: bool = False
    dense_layers: tuple[str, ...] = field(default=())


def methods(steps: int) -> list[Method]:
    """Return everything that is compared, for a retraining of so many steps."""
    return [
        Method("dense", None),
        *_level_methods(steps),
        *_two_four_methods(),
        Method("STR, sInit -5", _str()),
        Method("STR, sInit -5, decay 0.01", _str(), weight_decay=1e-3, threshold_decay=1e-2),
        Method("STR, sInit -5, decay 0.03", _str(), weight_decay=1e-3, threshold_decay=3e-2),
        *(_probmask(percent, steps) for percent in (80, 90, 95)),
        *(_admm(percent, uniform=uniform) for uniform, percent in ((True, 90), (False, 90), (False, 95))),
    ]


def expected_zeros(method: Method, percent: int, shapes: Mapping[str, Sequence[int]]) -> int | None:
    """Return how many zeros the weights of these shapes must have together; None when nothing is asked for."""
    pruned = {name: shape for name, shape in shapes.items() if name not in method.dense_layers}
    share = percent / 100
    if method.budget == "network":
        return round(share * sum(math.prod(shape) for shape in pruned.values()))
    if method.budget == "layer":
        return sum(round(share * math.prod(shape)) for shape in pruned.values())
    if method.budget == "filter":
        return sum(round(share * shape[0]) * math.prod(shape[1:]) for shape in pruned.values())
    if method.budget == "n:m":
        return sum(round(share * math.prod(shape)) for shape in pruned.values() if shape[1] % 4 == 0)
    if method.budget == "2:4":
        taken = [shape for shape in pruned.values() if shape[0] % 8 == 0 and shape[1] % 16 == 0]
        return sum(math.prod(shape) // 2 for shape in taken)
    return None


def _level_methods(steps: int) -> list[Method]:
    def config(generator: Mapping[str, Any], table: Sequence[int], **options: object) -> dict[str, Any]:
        return {
            "mask_generator": dict(generator),
            "fake_sparse": {"type": "FakeSparse"},
            "scheduler": {
                "type": "AmbaLevelPruneScheduler",
                "kwargs": {
                    "total_iters": steps,
                    "sparsity_table": list(table),
                    "do_sparse_analysis": True,
                    "output_dir": None,
                    "save_dir": None,
                    **options,
                },
            },
        }

    normal = {"type": "NormalMaskGenerator"}
    filters = {
        "filters by norm": {"type": "NormalMaskGenerator", "kwargs": {"structured": True, "func": "p2"}},
        "filters, FPGM": {"type": "FPGMMaskGenerator", "kwargs": {"func": "l2"}},
        "filters, nuclear": {"type": "NuclearMaskGenerator"},
    }
    long = (50, 70, 80, 90, 95)
    return [
        Method("levels, energy", config(normal, LEVELS, prun_algo=1), LEVELS, "network"),
        Method("levels, energy, to 95 %", config(normal, long, prun_algo=1), long, "network"),
        Method("levels, uniform", config(normal, LEVELS, prun_algo=0), LEVELS, "layer"),
        *(
            Method(
                f"levels, {name}",
                config(generator, (25, 50), prun_algo=0, no_prune_layer="head"),
                (25, 50),
                "filter",
                dense_layers=("head.weight",),
            )
            for name, generator in filters.items()
        ),
        Method("levels, 2:4", config({"type": "NMMaskGenerator"}, (25, 50), prun_algo=0), (25, 50), "n:m"),
    ]


def _two_four_methods() -> list[Method]:
    def method(name: str, calculator: str = "m4n2_1d", *, exact: bool = True, **options: bool) -> Method:
        kwargs = {"mask_calculator": calculator, "verbosity": 0, **options}
        config = {"scheduler": {"type": "AmpereScheduler", "kwargs": kwargs}}
        budget = "2:4" if exact else ""
        return Method(name, config, (50,), budget, recompute=options.get("allow_recompute_mask", False))

    return [
        method("Ampere, m4n2_1d", allow_recompute_mask=False, allow_permutation=False),
        method("Ampere, m4n2_1d, permuted", allow_permutation=True),
        method("Ampere, m4n2_1d, recomputed", allow_recompute_mask=True),
        method("Ampere, m4n2_2d_best", "m4n2_2d_best"),
        method("Ampere, m4n2_2d_greedy", "m4n2_2d_greedy", exact=False),  # may keep fewer than half
    ]


def _str() -> dict[str, Any]:
    return {
        "mask_generator": {"type": "STRMaskGenerator"},
        "fake_sparse": {"type": "STRFakeSparse", "kwargs": {"sInit_value": -5}},
        "scheduler": {"type": "BaseScheduler"},
    }


def _probmask(percent: int, steps: int) -> Method:
    kwargs = {
        "prune_rate": percent / 100,
        "total_iterations": steps,
        "warmup_iteration_stamps": round(0.1 * steps),
        "finetune_iteration_stamps": round(0.5 * steps),
    }
    config = {
        "mask_generator": {"type": "ProbMaskGenerator"},
        "fake_sparse": {"type": "ProbMaskFakeSparse"},
        "scheduler": {"type": "ProbMaskPruneScheduler", "kwargs": kwargs},
    }
    return Method(f"ProbMask, {percent} %", config, (percent,), "network")


def _admm(percent: int, *, uniform: bool) -> Method:
    config = {
        "mask_generator": {"type": "NormalMaskGenerator"},
        "fake_sparse": {"type": "FakeSparse"},
        "scheduler": {"type": "ADMMScheduler"},
        "sparsity": {"target_sparsity": percent / 100, "uniform": uniform},
    }
    name = f"ADMM, {'uniform' if uniform else 'global'}, {percent} %"
    return Method(name, config, (percent,), "layer" if uniform else "network")
