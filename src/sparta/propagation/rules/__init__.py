"""Rules that come with the package, one file per family of ops; importing this package registers them all."""

from sparta.propagation.rules import (
    attention,
    bits,
    convolution,
    elementwise,
    embedding,
    experts,
    indexing,
    joining,
    linear,
    norms,
    quantize,
    recurrent,
    reductions,
    shapes,
    slicing,
    spectral,
)

__all__ = [
    "attention",
    "bits",
    "convolution",
    "elementwise",
    "embedding",
    "experts",
    "indexing",
    "joining",
    "linear",
    "norms",
    "quantize",
    "recurrent",
    "reductions",
    "shapes",
    "slicing",
    "spectral",
]
