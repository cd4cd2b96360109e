"""Sparse modules for people: drop-ins for dense ones that choose their kernel by measurement."""

from sparta.arguments import front_door
from sparta.nn.attention import SeqlenDynamicSparseAttention, SparseAttention
from sparta.nn.conv import SparseConv1d, SparseConv2d
from sparta.nn.int8 import SparseInt8Linear
from sparta.nn.linear import SparseLinear
from sparta.nn.matmul import SparseBatchMatMul
from sparta.nn.moe import DynamicSparseMoE
from sparta.nn.operator import OperatorBase
from sparta.nn.softmax import SparseSoftmax
from sparta.nn.swap import swap
from sparta.nn.threshold import ThresholdLinear
from sparta.nn.tuning import build, operators_of, tune

__all__ = [
    "DynamicSparseMoE",
    "OperatorBase",
    "SeqlenDynamicSparseAttention",
    "SparseAttention",
    "SparseBatchMatMul",
    "SparseConv1d",
    "SparseConv2d",
    "SparseInt8Linear",
    "SparseLinear",
    "SparseSoftmax",
    "ThresholdLinear",
    "build",
    "operators_of",
    "swap",
    "tune",
]

front_door(globals(), __all__, ["OperatorBase.build", "OperatorBase.tune", "SparseInt8Linear.from_float"])
