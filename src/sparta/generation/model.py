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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sparta.compiler.report import Report
from sparta.errors import ValueRangeError, message
from sparta.generation.graphs import DecodeGraph, with_static_cache
from sparta.generation.greedy import greedy_sequences
from sparta.generation.program import DecodeProgram
from sparta.generation.prompts import PromptGraphs
from sparta.generation.replayed import replayed_sequences
from sparta.signing import SigningKey
from sparta.specialize.scaled_linear.inputs import shared_rounding
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
    graph
        What replays steps on CUDA; None where they run as they are.
    prompts
        What replays prompts on CUDA; None where they run as they are.
    """

    program: DecodeProgram | None = None
    output: type | None = None
    longest: int | None = None
    report: Report | None = None
    spec: Spec = field(default_factory=Spec)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    graph: DecodeGraph | None = None
    prompts: PromptGraphs | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Compiled:
        program = None if self.program is None else copy.deepcopy(self.program, memo)
        replayed = copy.deepcopy(self.graph, memo), copy.deepcopy(self.prompts, memo)
        return Compiled(program, self.output, self.longest, self.report, self.spec, self.provenance, *replayed)


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
    own_forward = original.forward
    signature = inspect.signature(own_forward)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return own_forward(self, *args, **kwargs)
        with shared_rounding():  # of this call: a step that is recorded rounds again
            return own_forward(self, *args, **kwargs)

    @functools.wraps(own_forward)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        embeds = kwargs.get("inputs_embeds")
        if self._sparta.program is not None and isinstance(embeds, Tensor):
            kwargs["inputs_embeds"] = embeds.float()  # a model in fewer bits was made one in float32
        with torch.no_grad():
            found = _stepped(self, forward, signature, args, kwargs)
            if found is not None:
                return found
            own = forward(self, *args, **kwargs)
            if self._sparta.output is None and hasattr(own, "past_key_values"):
                self._sparta.output = type(own)  # of a model that was loaded
            return own

    members: dict[str, Any] = {"forward": run, "__module__": original.__module__}
    sample = getattr(original, "_sample", None)  # what transformers decodes with, greedily or by sampling
    if callable(sample):

        @functools.wraps(sample)
        def decode(self: Any, *args: Any, **kwargs: Any) -> Any:
            follow = greedy_sequences if self._sparta.graph is None else replayed_sequences
            found = follow(self, sample, args, kwargs)
            return sample(self, *args, **kwargs) if found is None else found

        members["_sample"] = decode
    generate = getattr(original, "generate", None)
    if callable(generate):

        @functools.wraps(generate)
        def generated(self: Any, *args: Any, **kwargs: Any) -> Any:
            graph: DecodeGraph | None = self._sparta.graph
            if graph is None:
                return generate(self, *args, **kwargs)
            fits = not graph.problem and len(args) < 2
            try:
                return generate(self, *args, **(with_static_cache(self.generation_config, kwargs) if fits else kwargs))
            finally:
                graph.forget()  # its cache is let go with it

        members["generate"] = generated
    made = type(original.__name__, (GenerativeModel, original), members)
    made.__qualname__ = original.__qualname__
    return made


def _stepped(
    model: Any, forward: Callable[..., Any], signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return the output of a call by the decode program or by a replay; None where neither takes the call."""
    compiled: Compiled = model._sparta
    steps = compiled.program is not None or compiled.graph is not None
    if not steps or compiled.output is None or torch.compiler.is_compiling():
        return None
    try:
        bound = signature.bind(model, *args, **kwargs).arguments
    except TypeError:
        return None  # the model's own code says what is wrong
    named = {name: value for name, value in bound.items() if name not in ("self", "kwargs")}
    named.update(bound.get("kwargs", {}))
    if compiled.graph is not None:
        return _replayed(compiled, functools.partial(forward, model), named)
    long = compiled.longest is not None and _tokens(named) > compiled.longest
    result = None if compiled.program is None or long else compiled.program.step(model, named)
    return None if result is None else compiled.output(logits=result[0], past_key_values=result[1])


def _replayed(compiled: Compiled, forward: Callable[..., Any], named: Mapping[str, Any]) -> Any:
    """Return the output of a step or a prompt that is replayed from a CUDA graph; None where the call is neither."""
    assert compiled.graph is not None  # noqa: S101
    assert compiled.output is not None  # noqa: S101
    step = compiled.graph.step(forward, named)
    if step is not None:
        return compiled.output(logits=step, past_key_values=named["past_key_values"])
    prompt = None if compiled.prompts is None else compiled.prompts.prompt(forward, named)
    return None if prompt is None else compiled.output(logits=prompt[0], past_key_values=prompt[1])


def _tokens(named: Mapping[str, Any]) -> int:
    """Return how many tokens a call has, of all its sequences."""
    given = named.get("input_ids") if named.get("input_ids") is not None else named.get("inputs_embeds")
    return given.shape[0] * given.shape[1] if isinstance(given, Tensor) and given.dim() > 1 else 0
