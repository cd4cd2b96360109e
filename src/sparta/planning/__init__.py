"""The sparsity plan: which layers, how much, in which pattern, for an asked speed-up on this machine.

:func:`plan` is the verb, `sparta.plan` its short name. Times come from the tuner, costs from calibration data, and the
choice from an exact solver; the answer is compiled, measured, and corrected until it keeps what was asked.
"""

from sparta.arguments import front_door
from sparta.planning.api import plan
from sparta.planning.options import Option
from sparta.planning.result import CurvePoint, Goal, SparsityPlan

__all__ = ["CurvePoint", "Goal", "Option", "SparsityPlan", "plan"]

front_door(globals(), ["plan"], ["SparsityPlan.at", "SparsityPlan.apply", "SparsityPlan.compile", "SparsityPlan.save"])
