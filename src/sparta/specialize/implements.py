"""All implements that come with the package: importing this module puts them into the registry, dense first."""

import sparta.specialize.cpu.implement
import sparta.specialize.dense
import sparta.specialize.torch_sparse  # noqa: F401
