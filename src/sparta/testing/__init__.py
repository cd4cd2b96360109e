"""Helpers for tests, this package's and its users': masks, references, checks, timing, environment.

Make a mask with :func:`block_mask`, compute the truth with a ``*_reference``, compare with :func:`check`, time with
:func:`profile` or :func:`compare`. Nothing here needs a GPU, a compiler or an optional package, so the same test runs
everywhere.
"""

from sparta.arguments import front_door
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
from sparta.measure.timing import Comparison, Timing, compare, profile
from sparta.testing.masks import block_mask

__all__ = [
    "Agreement",
    "Backend",
    "Comparison",
    "Environment",
    "Timing",
    "attention_reference",
    "block_mask",
    "check",
    "compare",
    "conv_reference",
    "environment",
    "linear_reference",
    "matmul_reference",
    "moe_reference",
    "profile",
    "softmax_backward_reference",
    "softmax_reference",
    "sparse_multi_head_attention_reference",
    "sparse_softmax_backward_reference",
    "sparse_softmax_forward_reference",
    "tolerance",
]

front_door(globals(), __all__)
