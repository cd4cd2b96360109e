"""Sparsify: prune a model while it trains, or at once.

A sparsifier is a *score* (what to prune first) × a *pattern* (where zeros may be) × an *allocation* (how much per
layer) × a *schedule* (when). Schedulers and recipes are built on the same parts. Each part is small, separate and
replaceable, and together they are :class:`Sparsifier`.
"""

from sparta.arguments import front_door
from sparta.sparsify.activations import ActivationWeighted
from sparta.sparsify.allocation import (
    ERK,
    Allocation,
    Candidate,
    Energy,
    Global,
    Sensitivity,
    Uniform,
    erk_densities,
    lamp,
)
from sparta.sparsify.layers import Layer, along_inputs, find_layers
from sparta.sparsify.logs import History, writer
from sparta.sparsify.masks import Masks
from sparta.sparsify.project import make_masks
from sparta.sparsify.schedule import Schedule, level_starts
from sparta.sparsify.scores import Gradient, Magnitude, Movement, Random, Score, Taylor, make_score
from sparta.sparsify.sensitivity import measure_sensitivity
from sparta.sparsify.sparsifier import Sparsifier

__all__ = [
    "ERK",
    "ActivationWeighted",
    "Allocation",
    "Candidate",
    "Energy",
    "Global",
    "Gradient",
    "History",
    "Layer",
    "Magnitude",
    "Masks",
    "Movement",
    "Random",
    "Schedule",
    "Score",
    "Sensitivity",
    "Sparsifier",
    "Taylor",
    "Uniform",
    "along_inputs",
    "erk_densities",
    "find_layers",
    "lamp",
    "level_starts",
    "make_masks",
    "make_score",
    "measure_sensitivity",
    "writer",
]

front_door(globals(), __all__, ["Sparsifier.load_state_dict", "Masks.load_state_dict"])
