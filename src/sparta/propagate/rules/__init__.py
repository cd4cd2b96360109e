"""Rules that come with the package, one file a family of ops; importing this package registers them all."""

from sparta.propagate.rules import (
    attention,
    bits,
    convolution,
    elementwise,
    embedding,
    experts,
    indexing,
    linear,
    norms,
    pieces,
    quantise,
    reductions,
    shapes,
)

__all__ = [
    "attention",
    "bits",
    "convolution",
    "elementwise",
    "embedding",
    "experts",
    "indexing",
    "linear",
    "norms",
    "pieces",
    "quantise",
    "reductions",
    "shapes",
]
