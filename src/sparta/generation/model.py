"""GenerativeModel: a compiled model of transformers that is still one: `generate`, its output classes, its config.

The compiled model is a copy of the user's with the same storage, whose class derives from the model's own. Its forward
runs the decode program where the call fits one, and the model's own code with sparse layers otherwise, so that what
transformers builds on top (sampling, beams, streamers, assistants) needs nothing special.
"""

from __future__ import annotations

import copy
import functools
import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sparta.compiler.report import Report
from sparta.errors import ValueRangeError, message
from sparta.generation.greedy import greedy_sequences
from sparta.generation.program import DecodeProgram
from sparta.signing import SigningKey
from sparta.tesa.spec import Spec

__all__ = ["Compiled", "GenerativeModel", "compiled_class", "shared_copy"]


@dataclass
class Compiled:
    """What a generative model runs, and what is known of it.

    Attributes
    ----------
    program
        What runs whole steps in C++; None where the model's own code runs.
    output
        The class of the model's outputs.
    longest
        More tokens of a call than this go to the model's own code, which was measured to be faster there.
    """

    program: DecodeProgram | None = None
    output: type | None = None
    longest: int | None = None
    report: Report | None = None
    spec: Spec = field(default_factory=Spec)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> Compiled:
        program = None if self.program is None else copy.deepcopy(self.program, memo)
        return Compiled(program, self.output, self.longest, self.report, self.spec, self.provenance)


class GenerativeModel(nn.Module):
    """What a compiled language model is beside what its own class says.

    It is for inference: it runs without autograd, in evaluation mode, on the device it was compiled for.
    """

    _sparta: Compiled

    @property
    def report(self) -> Report:
        """What runs each layer, how fast, and why."""
        assert self._sparta.report is not None  # noqa: S101 - set before it is handed over
        return self._sparta.report

    @property
    def spec(self) -> Spec:
        """What is pruned."""
        return self._sparta.spec

    @property
    def provenance(self) -> Mapping[str, Any]:
        """What it was compiled with, and where."""
        return self._sparta.provenance

    @property
    def program(self) -> DecodeProgram | None:
        """What runs whole steps in C++, or None."""
        return self._sparta.program

    def save(self, path: str | os.PathLike[str], *, sign: SigningKey | str | os.PathLike[str] | None = None) -> None:
        """Write it to one file, which :func:`sparta.load` reads where transformers is installed.

        With `sign`, a key or its file, the signature of all its bytes is written to ``PATH.minisig``.
        """
        from sparta.generation.artifact import save

        save(self, path, sign)

    def train(self, mode: bool = True) -> GenerativeModel:  # noqa: FBT001, FBT002 - PyTorch's signature
        """Stay in evaluation mode; raises for training mode."""
        if mode:
            raise ValueRangeError(
                message("training mode for a compiled language model", "evaluation mode", "train the original")
            )
        super().train(False)  # noqa: FBT003
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> GenerativeModel:  # noqa: FBT001, FBT002 - PyTorch's protocol
        like = next((p for p in self.parameters() if p.is_floating_point()), None)
        if like is not None:
            before = torch.empty(0, dtype=like.dtype, device=like.device)
            after = fn(before)
            if after.dtype != before.dtype or after.device != before.device:
                given = f"a compiled language model to {after.dtype} on {after.device}"
                fix = "compile the original with device= and dtype= instead"
                raise ValueRangeError(message(given, f"{before.dtype} on {before.device}", fix))
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self


def shared_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a model that shares all its parameters and buffers, in evaluation mode.

    >>> model = nn.Linear(2, 2)
    >>> shared_copy(model).weight is model.weight
    True
    """
    tensors = [*model.parameters(), *model.buffers()]
    copied = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    return copied.eval()


@functools.cache
def compiled_class(original: type[nn.Module]) -> type[nn.Module]:
    """Return the class of compiled models of a class of transformers.

    It has the name of the original, which transformers looks at here and there, and the signature of its forward.
    """
    forward = original.forward
    signature = inspect.signature(forward)

    @functools.wraps(forward)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            found = _stepped(self, signature, args, kwargs)
            return forward(self, *args, **kwargs) if found is None else found

    members: dict[str, Any] = {"forward": run, "__module__": original.__module__}
    sample = getattr(original, "_sample", None)  # what transformers decodes with, greedily or by sampling
    if callable(sample):

        @functools.wraps(sample)
        def decode(self: Any, *args: Any, **kwargs: Any) -> Any:
            found = greedy_sequences(self, sample, args, kwargs)
            return sample(self, *args, **kwargs) if found is None else found

        members["_sample"] = decode
    made = type(original.__name__, (GenerativeModel, original), members)
    made.__qualname__ = original.__qualname__
    return made


def _stepped(model: Any, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the output of a call by the decode program; None where it does not take the call."""
    compiled: Compiled = model._sparta
    if compiled.program is None or compiled.output is None or torch.compiler.is_compiling():
        return None
    try:
        bound = signature.bind(model, *args, **kwargs).arguments
    except TypeError:
        return None  # the model's own code says what is wrong
    named = {name: value for name, value in bound.items() if name not in ("self", "kwargs")}
    named.update(bound.get("kwargs", {}))
    if compiled.longest is not None and _tokens(named) > compiled.longest:
        return None
    result = compiled.program.step(model, named)
    if result is None:
        return None
    logits, cache = result
    return compiled.output(logits=logits, past_key_values=cache)


def _tokens(named: Mapping[str, Any]) -> int:
    """Return how many tokens a call has, of all its sequences."""
    given = named.get("input_ids") if named.get("input_ids") is not None else named.get("inputs_embeds")
    return given.shape[0] * given.shape[1] if isinstance(given, Tensor) and given.dim() > 1 else 0
