"""Precision: fewer bits for weights and inputs after training, with accuracy kept within bounds.

:func:`quantize` does it for a model and some data; ``sparta.compile(..., precision="int8")`` does the same and compiles
the result.
"""

from sparta.precision.api import FORMATS, Quantized, quantize
from sparta.precision.formats import Float8
from sparta.precision.observe import OBSERVERS
from sparta.precision.report import LayerPrecision, PrecisionReport

__all__ = [
    "FORMATS",
    "OBSERVERS",
    "Float8",
    "LayerPrecision",
    "PrecisionReport",
    "Quantized",
    "quantize",
]
