"""Measure: the clock, the checks, the references and the machine, for all that decides by measurement.

Compute the truth with a ``*_reference``, compare with :func:`check`, time with :func:`profile` or
:func:`compare`. Nothing here needs a GPU, a compiler or an optional package, so it runs everywhere.
"""

from sparta.measure.capabilities import Backend, Environment, environment
from sparta.measure.checks import Agreement, check, tolerance
from sparta.measure.references import (
    attention_reference,
    conv_reference,
    linear_reference,
    matmul_reference,
    moe_reference,
    softmax_backward_reference,
    softmax_reference,
    sparse_multi_head_attention_reference,
    sparse_softmax_backward_reference,
    sparse_softmax_forward_reference,
)
from sparta.measure.roofline import reached
from sparta.measure.timing import Comparison, Timing, compare, profile

__all__ = [
    "Agreement",
    "Backend",
    "Comparison",
    "Environment",
    "Timing",
    "attention_reference",
    "check",
    "compare",
    "conv_reference",
    "environment",
    "linear_reference",
    "matmul_reference",
    "moe_reference",
    "profile",
    "reached",
    "softmax_backward_reference",
    "softmax_reference",
    "sparse_multi_head_attention_reference",
    "sparse_softmax_backward_reference",
    "sparse_softmax_forward_reference",
    "tolerance",
]
