"""All implements that come with the package: importing this module puts them into the registry."""

# ruff: noqa: F401, I001 - imported to be registered, in the order that searches follow

import sparta.specialize.attention.spec
import sparta.specialize.matmul.spec
import sparta.specialize.conv.dense
import sparta.specialize.conv.cpu
import sparta.specialize.linear.cpu_generated
import sparta.specialize.linear.cpu
import sparta.specialize.int8_linear.cpu
import sparta.specialize.matmul.cpu
import sparta.specialize.attention.triton_flash
import sparta.specialize.matmul.triton_block
import sparta.specialize.linear.cusparselt
import sparta.specialize.linear.triton_block.implement
import sparta.specialize.moe.triton_ragged
import sparta.specialize.softmax.triton_block
import sparta.specialize.linear.cuda_24
import sparta.specialize.linear.cuda_bitmap
import sparta.specialize.linear.dense
import sparta.specialize.int8_linear.dense
import sparta.specialize.moe.spec
import sparta.specialize.matmul.sampled
import sparta.specialize.seqlen_attention.spec
import sparta.specialize.softmax.spec
import sparta.specialize.linear.split
import sparta.specialize.linear.torch_sparse
import sparta.specialize.linear.tvm
import sparta.specialize.int8_linear.quantization
