"""TeSA: what is known of each element of each tensor, and how that is written down.

The first room of the house; it knows none of the others. `grid` stores attributes, `attribute` is the TeSA itself,
`algebra` combines two, `patterns` say where zeros may be, `formats` pack what is live, `cover` and `rounding` turn an
irregular TeSA into a sum of regular ones, and `spec` holds the TeSAs of a whole model.
"""

from sparta.arguments import front_door
from sparta.tesa.algebra import conflicts, join, meet
from sparta.tesa.attribute import TeSA
from sparta.tesa.bits import BitFormat, bit_format
from sparta.tesa.cover import Cover, block_cover
from sparta.tesa.formats import (
    BCSC,
    BCSR,
    BCSRC,
    Bitmap,
    NMPacked,
    Packed,
    Packed24,
    get_bcs_function,
    pack,
)
from sparta.tesa.grid import Grid
from sparta.tesa.patterns import (
    NM,
    VNM,
    Block,
    Channel,
    Detection,
    Pattern,
    Unstructured,
    as_pattern,
    detect,
    parse_pattern,
)
from sparta.tesa.rounding import round_bits, roundings, split_bits
from sparta.tesa.spec import Spec, prunable

__all__ = [
    "BCSC",
    "BCSR",
    "BCSRC",
    "NM",
    "VNM",
    "BitFormat",
    "Bitmap",
    "Block",
    "Channel",
    "Cover",
    "Detection",
    "Grid",
    "NMPacked",
    "Packed",
    "Packed24",
    "Pattern",
    "Spec",
    "TeSA",
    "Unstructured",
    "as_pattern",
    "bit_format",
    "block_cover",
    "conflicts",
    "detect",
    "get_bcs_function",
    "join",
    "meet",
    "pack",
    "parse_pattern",
    "prunable",
    "round_bits",
    "roundings",
    "split_bits",
]

front_door(
    globals(),
    __all__,
    [
        *(f"Spec.{name}" for name in ("from_zeros", "from_pattern", "load", "save", "apply", "check")),
        *(f"TeSA.{name}" for name in ("from_mask", "from_pattern", "constant", "dense")),
        "Pattern.project",
        "Pattern.validate",
    ],
)
