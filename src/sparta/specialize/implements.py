"""All implements that come with the package: importing this module puts them into the registry, dense first."""

import sparta.specialize.attention
import sparta.specialize.batch_matmul
import sparta.specialize.cpu.implement
import sparta.specialize.cuda.implement
import sparta.specialize.dense
import sparta.specialize.moe
import sparta.specialize.seqlen_attention
import sparta.specialize.softmax
import sparta.specialize.torch_sparse  # noqa: F401
