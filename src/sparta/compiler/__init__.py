"""Compiler: a whole model, measured faster, never slower by choice, verified, saved.

`api` runs the steps in order; `partition`, `choose`, `whole` and `verify` are the steps; `module`, `report` and
`artifact` are what comes out; `interface` is the contract for other compilers. The one idea to know: every decision is
measured, and the dense original is always among what is measured.
"""

from sparta.compiler.api import compile_model
from sparta.compiler.api import compile_model as compile  # noqa: A004 - `sparta.compile` is its public name
from sparta.compiler.artifact import load
from sparta.compiler.module import CompiledModel
from sparta.compiler.plan import LayerPlan, Plan, Whole
from sparta.compiler.report import Report, Totals
from sparta.compiler.verify import Certificate

__all__ = [
    "Certificate",
    "CompiledModel",
    "LayerPlan",
    "Plan",
    "Report",
    "Totals",
    "Whole",
    "compile",
    "compile_model",
    "load",
]
