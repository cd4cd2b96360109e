"""All implements that come with the package: importing this module puts them into the registry, dense first."""

import sparta.specialize.attention
import sparta.specialize.batch_matmul
import sparta.specialize.conv_dense
import sparta.specialize.cpu.conv_implement
import sparta.specialize.cpu.generated
import sparta.specialize.cpu.implement
import sparta.specialize.cpu.int8
import sparta.specialize.cpu.masked_input
import sparta.specialize.cuda.attention
import sparta.specialize.cuda.batch_matmul
import sparta.specialize.cuda.cusparselt
import sparta.specialize.cuda.implement
import sparta.specialize.cuda.ragged_moe
import sparta.specialize.cuda.softmax
import sparta.specialize.cuda.two_four
import sparta.specialize.cuda.unstructured
import sparta.specialize.dense
import sparta.specialize.int8_dense
import sparta.specialize.moe
import sparta.specialize.sampled
import sparta.specialize.seqlen_attention
import sparta.specialize.softmax
import sparta.specialize.split
import sparta.specialize.torch_sparse
import sparta.specialize.tvm_linear  # noqa: F401
