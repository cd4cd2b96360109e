"""Compiler: a whole model, measured faster, never slower by choice, verified, saved.

`api` runs the steps in order: `graph` and `lower` prepare, `choose` searches, `verify` checks. `run` is what runs,
`report` and `artifact` are what comes out, `exchange` is the contract for other compilers, `aot` is for C++ programs.
Every decision is measured, and the dense original is always among what is measured.
"""

from sparta.arguments import front_door
from sparta.compiler import background as _background  # noqa: F401 - it gives compiled models their search
from sparta.compiler.api import compile_model
from sparta.compiler.api import compile_model as compile  # noqa: A004 - `sparta.compile` is its public name
from sparta.compiler.artifact import load
from sparta.compiler.in_place import optimize
from sparta.compiler.plan import EndToEnd, LayerPlan, Plan
from sparta.compiler.report import Report, Totals
from sparta.compiler.run.compiled_model import CompiledModel
from sparta.compiler.run.partial_model import PartialModel
from sparta.compiler.verify import Certificate

__all__ = [
    "Certificate",
    "CompiledModel",
    "EndToEnd",
    "LayerPlan",
    "PartialModel",
    "Plan",
    "Report",
    "Totals",
    "compile",
    "compile_model",
    "load",
    "optimize",
]

front_door(globals(), ["compile", "compile_model", "load", "optimize"])
