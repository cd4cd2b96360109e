"""Sparse modules for people: drop-ins for dense ones that choose their kernel by measurement."""

from sparta.nn.linear import SparseLinear
from sparta.nn.operator import OperatorBase
from sparta.nn.swap import swap
from sparta.nn.tuning import build, operators_of, tune

__all__ = ["OperatorBase", "SparseLinear", "build", "operators_of", "swap", "tune"]
