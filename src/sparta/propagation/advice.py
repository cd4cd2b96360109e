"""Advice: why a model could not be captured, told by its cause, and torch's own pages of log kept back meanwhile.

`torch.export` fails in a handful of ways that ask for different changes; its message is meant for its developers.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

__all__ = ["advice_on", "quiet"]

_LOGGERS = (
    "torch",
    "torch._export",
    "torch.export",
    "torch.fx",
    "torch.fx.experimental.symbolic_shapes",
    "torch._dynamo",
)
_REWRITE = (
    "rewrite that line without data-dependent `if`, `.item()` or `len()` (torch.where, masking), or pass the part of "
    "the model that can be traced; sparta.compile compiles such a model by its modules"
)
_CAUSES: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        ("DynamicCache", "EncoderDecoderCache", "StaticCache"),
        "results that are tensors in tuples, lists, dicts and data classes",
        "set model.config.use_cache = False, or pass use_cache=False among the example inputs",
    ),
    (
        ("which is not a known type", "Unsupported input type", "register_dataclass", "not registered"),
        "arguments and results that are tensors, numbers, tuples, lists, dicts and data classes",
        "return one of these, or register the class with torch.export.register_dataclass",
    ),
    (
        ("missing a required argument", "got an unexpected keyword", "positional argument", "too many positional"),
        "the arguments of forward: a tuple of positional ones or a dict by name",
        "wrap one argument that is itself a dict or a list in a tuple: (batch,)",
    ),
    (
        ("ScriptModule", "ScriptFunction", "scripted", "torch.jit"),
        "a model in Python",
        "pass the module that was scripted or traced, not what torch.jit made of it",
    ),
    (
        ("UninitializedParameter", "uninitialized parameter", "Lazy"),
        "a model whose tensors are made",
        "call it once before",
    ),
    (
        ("nference tensor", "inference mode"),
        "a model whose tensors were made outside of torch.inference_mode()",
        "make the model, or copy it with copy.deepcopy, outside of inference mode",
    ),
    (
        ("torch.compiler.disable", "disable is not supported"),
        "a model without wrappers around it",
        "pass the module inside the wrapper",
    ),
    (
        ("Constraints violated", "dynamic_shapes", "Dim("),
        "dims that the model lets change",
        "leave dynamic_shapes out, and they are found",
    ),
    (
        ("data-dependent", "data dependent", "GuardOnDataDependent", "bool(Tensor)", "item()", "u0"),
        "a forward whose path does not depend on the values of tensors",
        _REWRITE,
    ),
)


def advice_on(error: BaseException) -> tuple[str, str]:
    """Return what is allowed and what to do about an error of `torch.export`.

    >>> advice_on(TypeError("missing a required argument: 'batch'"))[1]
    'wrap one argument that is itself a dict or a list in a tuple: (batch,)'
    """
    text = f"{type(error).__name__}: {error}"
    for signs, allowed, fix in _CAUSES:
        if any(sign in text for sign in signs):
            return allowed, fix
    return (
        "a forward that torch.export can trace",
        "pass the part of the model that can be traced; sparta.compile compiles what cannot by its modules",
    )


@contextmanager
def quiet() -> Iterator[None]:
    """Keep torch's log of a failed or narrowed trace back for a while."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with redirect_stderr(io.StringIO()):  # where torch prints the graph up to the line that it cannot trace
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
