"""One-shot pruning: a trained model becomes sparse in one pass over some data, without training.

:func:`prune` is the verb; a *method* decides which weights of a layer go and how those that stay make up for them.
Methods see a :class:`Problem` (weight, Gram matrix of the inputs, pattern, count) and nothing of the model, so a new
method is one function registered by :func:`method`.
"""

from sparta.arguments import front_door
from sparta.oneshot.api import prune
from sparta.oneshot.log import LayerLog, PruneLog
from sparta.oneshot.methods import method, method_names
from sparta.oneshot.offload import empty_weights
from sparta.oneshot.problem import Layout, Problem, Solution

__all__ = ["LayerLog", "Layout", "Problem", "PruneLog", "Solution", "empty_weights", "method", "method_names", "prune"]

front_door(globals(), ["prune", "method"])
