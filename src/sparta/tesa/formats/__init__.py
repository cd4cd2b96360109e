"""Storage formats: how the live values of a matrix are kept, packed and unpacked.

A TeSA says which elements matter; a format says where their values lie in memory, which is what kernels and files read.
:func:`pack` and :func:`unpack` are exact inverses on live elements, and what is not live comes back as 0.
"""

from sparta.tesa.formats.base import Packed, format_named, known_formats, pack, register_format, unpack
from sparta.tesa.formats.bcs import BCSC, BCSR, BCSRC, BlockPacked
from sparta.tesa.formats.bitmap import Bitmap
from sparta.tesa.formats.block_index import BlockIndex
from sparta.tesa.formats.functions import (
    BCSCIndexes,
    BCSRCIndexes,
    BCSRIndexes,
    TeSAFunctionContext,
    TeSAIndexes,
    get_bcs_function,
)
from sparta.tesa.formats.mask_bits import pack_bits, unpack_bits
from sparta.tesa.formats.nm import NMPacked
from sparta.tesa.formats.packed24 import Packed24
from sparta.tesa.formats.torch_sparse import from_torch, to_torch_bsc, to_torch_bsr, to_torch_csr

__all__ = [
    "BCSC",
    "BCSR",
    "BCSRC",
    "BCSCIndexes",
    "BCSRCIndexes",
    "BCSRIndexes",
    "Bitmap",
    "BlockIndex",
    "BlockPacked",
    "NMPacked",
    "Packed",
    "Packed24",
    "TeSAFunctionContext",
    "TeSAIndexes",
    "format_named",
    "from_torch",
    "get_bcs_function",
    "known_formats",
    "pack",
    "pack_bits",
    "register_format",
    "to_torch_bsc",
    "to_torch_bsr",
    "to_torch_csr",
    "unpack",
    "unpack_bits",
]
