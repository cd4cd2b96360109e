"""Schedulers: sparsity-aware training from a configuration.

:func:`build_sparse_scheduler` makes a scheduler of a dictionary; `prepare_sparse_model`, `prune_model` after each step
and `export_sparse_model` are then all that a training loop calls. Everything is checked before anything happens, and
every scheduler's state can be saved and resumed exactly.
"""

from sparta.arguments import front_door
from sparta.scheduler.admm import ADMMScheduler
from sparta.scheduler.ampere import AmpereScheduler
from sparta.scheduler.base import BaseScheduler, Exported, Setup, STRScheduler
from sparta.scheduler.config import build_sparse_scheduler
from sparta.scheduler.fake_sparse import FakeSparse, FakeSparseBase, ProbMaskFakeSparse, STRFakeSparse
from sparta.scheduler.generators import (
    FPGMMaskGenerator,
    MaskGenerator,
    NMMaskGenerator,
    NormalMaskGenerator,
    NuclearMaskGenerator,
    ProbMaskGenerator,
    STRMaskGenerator,
)
from sparta.scheduler.hardware import DEVICES, Device, presets
from sparta.scheduler.levels import AmbaLevelPruneScheduler
from sparta.scheduler.mask_calculators import mask_calculator
from sparta.scheduler.permutation import kept_magnitude, search_permutation
from sparta.scheduler.probmask import ProbMaskPruneScheduler
from sparta.scheduler.registry import register_fake_sparse, register_mask_generator, register_scheduler

__all__ = [
    "DEVICES",
    "ADMMScheduler",
    "AmbaLevelPruneScheduler",
    "AmpereScheduler",
    "BaseScheduler",
    "Device",
    "Exported",
    "FPGMMaskGenerator",
    "FakeSparse",
    "FakeSparseBase",
    "MaskGenerator",
    "NMMaskGenerator",
    "NormalMaskGenerator",
    "NuclearMaskGenerator",
    "ProbMaskFakeSparse",
    "ProbMaskGenerator",
    "ProbMaskPruneScheduler",
    "STRFakeSparse",
    "STRMaskGenerator",
    "STRScheduler",
    "Setup",
    "build_sparse_scheduler",
    "kept_magnitude",
    "mask_calculator",
    "presets",
    "register_fake_sparse",
    "register_mask_generator",
    "register_scheduler",
    "search_permutation",
]

front_door(globals(), [name for name in __all__ if not name.startswith(("DEVICES", "register_"))])
