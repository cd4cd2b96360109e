"""All implements that come with the package, by operation, dense first: what the registry begins with.

A new implement of the package is one new file and one line here. Importing other modules registers nothing, so the
registry is the same whatever was imported before, and in which order.
"""

from __future__ import annotations

from sparta.specialize.attention.spec import BlocksAttention, DenseAttention
from sparta.specialize.attention.triton_flash import TritonFlash, TritonFlashSeqlen
from sparta.specialize.conv.cpu import CpuConv1d, CpuConv2d
from sparta.specialize.conv.cpu_bf16 import CpuBf16Conv1d, CpuBf16Conv2d
from sparta.specialize.conv.cpu_whole import CpuDenseConv1d, CpuDenseConv2d
from sparta.specialize.conv.dense import DenseConv1d, DenseConv2d
from sparta.specialize.conv.int8 import (
    CpuInt8Conv1d,
    CpuInt8Conv2d,
    DenseQuantizedConv1d,
    DenseQuantizedConv2d,
    RealQuantizedConv1d,
    RealQuantizedConv2d,
    WholeQuantizedConv1d,
    WholeQuantizedConv2d,
)
from sparta.specialize.implement import Implement
from sparta.specialize.int8_linear.cpu import CpuInt8Linear
from sparta.specialize.int8_linear.cpu_weight8 import CpuWeight8
from sparta.specialize.int8_linear.dense import OneDnnInt8Linear, TorchInt8Linear
from sparta.specialize.int8_linear.quantized import CpuQuantized, DenseQuantized
from sparta.specialize.linear.cpu import CpuLinear
from sparta.specialize.linear.cpu_bf16 import CpuBf16
from sparta.specialize.linear.cpu_bf16_panel import CpuBf16Panel
from sparta.specialize.linear.cpu_generated import CpuGenerated
from sparta.specialize.linear.cuda_24 import TwoFour
from sparta.specialize.linear.cuda_24_matrix import TwoFourMatrix
from sparta.specialize.linear.cuda_24_resident import TwoFourResident
from sparta.specialize.linear.cuda_24_twice import CudaTwice
from sparta.specialize.linear.cuda_banks import CudaBanks
from sparta.specialize.linear.cuda_bitmap import CudaBitmap
from sparta.specialize.linear.cuda_block import CudaBlock
from sparta.specialize.linear.cuda_block_few import CudaBlockFew
from sparta.specialize.linear.cuda_gather import CudaGather
from sparta.specialize.linear.cuda_lanes import CudaLanes
from sparta.specialize.linear.cusparselt import CuSparseLt
from sparta.specialize.linear.dense import DenseLinear
from sparta.specialize.linear.split import SplitLinear
from sparta.specialize.linear.torch_sparse import TorchBSR, TorchCSR
from sparta.specialize.linear.triton_block.implement import TritonBlock
from sparta.specialize.linear.tvm import TvmLinear
from sparta.specialize.matmul.cpu import CpuMaskedInput
from sparta.specialize.matmul.sampled import SampledMatmul
from sparta.specialize.matmul.spec import BlocksMatmul, DenseMatmul
from sparta.specialize.matmul.triton_block import TritonBlockMatmul
from sparta.specialize.moe.spec import DenseMoE, SortedMoE
from sparta.specialize.moe.triton_ragged import TritonRagged
from sparta.specialize.scaled_linear.cuda_24 import ScaledResident, ScaledTwoFour
from sparta.specialize.scaled_linear.cuda_24_matrix import Fp8Matrix
from sparta.specialize.scaled_linear.cuda_banks import ScaledBanks
from sparta.specialize.scaled_linear.cuda_block import Fp8CudaBlock
from sparta.specialize.scaled_linear.cuda_block_few import ScaledBlockFew
from sparta.specialize.scaled_linear.cuda_gather import ScaledGather
from sparta.specialize.scaled_linear.dense import DenseFp8, DenseScaled
from sparta.specialize.scaled_linear.triton_block import Fp8Block, ScaledBlock
from sparta.specialize.seqlen_attention.spec import DenseSeqlenAttention, LengthsSeqlenAttention
from sparta.specialize.softmax.spec import BlocksSoftmax, DenseSoftmax
from sparta.specialize.softmax.triton_block import TritonBlockSoftmax

__all__ = ["IMPLEMENTS"]

_LINEAR: tuple[type[Implement], ...] = (
    DenseLinear,
    CpuGenerated,
    CpuLinear,
    CpuBf16,
    CpuBf16Panel,
    CuSparseLt,
    TwoFourMatrix,
    CudaBlock,
    CudaBlockFew,
    TritonBlock,
    TwoFour,
    TwoFourResident,
    CudaBitmap,
    CudaLanes,
    CudaTwice,
    CudaGather,
    CudaBanks,
    SplitLinear,
    TorchCSR,
    TorchBSR,
    TvmLinear,
)
# What skips nothing comes before what skips zeros: depthwise layers, which both take, are the former's, and for weights
# with many zeros it is no candidate.
_CONVOLUTIONS: tuple[type[Implement], ...] = (
    DenseConv2d,
    CpuDenseConv2d,
    CpuConv2d,
    CpuBf16Conv2d,
    DenseConv1d,
    CpuDenseConv1d,
    CpuConv1d,
    CpuBf16Conv1d,
)
_INT8_CONVOLUTIONS: tuple[type[Implement], ...] = (
    DenseQuantizedConv2d,
    CpuInt8Conv2d,
    WholeQuantizedConv2d,
    RealQuantizedConv2d,
    DenseQuantizedConv1d,
    CpuInt8Conv1d,
    WholeQuantizedConv1d,
    RealQuantizedConv1d,
)
_INT8_LINEAR: tuple[type[Implement], ...] = (
    DenseQuantized,
    CpuQuantized,
    CpuInt8Linear,
    CpuWeight8,
    OneDnnInt8Linear,
    TorchInt8Linear,
)
_SCALED_LINEAR: tuple[type[Implement], ...] = (
    DenseScaled,
    DenseFp8,
    Fp8Matrix,
    Fp8CudaBlock,
    ScaledBlockFew,
    Fp8Block,
    ScaledBlock,
    ScaledTwoFour,
    ScaledResident,
    ScaledGather,
    ScaledBanks,
)
_MATMUL: tuple[type[Implement], ...] = (DenseMatmul, BlocksMatmul, CpuMaskedInput, TritonBlockMatmul, SampledMatmul)
_SOFTMAX: tuple[type[Implement], ...] = (DenseSoftmax, BlocksSoftmax, TritonBlockSoftmax)
_ATTENTION: tuple[type[Implement], ...] = (DenseAttention, BlocksAttention, TritonFlash)
_SEQLEN_ATTENTION: tuple[type[Implement], ...] = (DenseSeqlenAttention, LengthsSeqlenAttention, TritonFlashSeqlen)
_MOE: tuple[type[Implement], ...] = (DenseMoE, SortedMoE, TritonRagged)

IMPLEMENTS: tuple[type[Implement], ...] = (
    *_LINEAR,
    *_CONVOLUTIONS,
    *_INT8_CONVOLUTIONS,
    *_INT8_LINEAR,
    *_SCALED_LINEAR,
    *_MATMUL,
    *_SOFTMAX,
    *_ATTENTION,
    *_SEQLEN_ATTENTION,
    *_MOE,
)
"""The classes in the order that searches follow."""
