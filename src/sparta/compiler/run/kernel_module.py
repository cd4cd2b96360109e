"""Kernel modules: one fused sub-graph at run time, with its live weights and the kernels that run it.

A :class:`KernelModule` stands in the compiled graph where the calls of a sub-graph stood. Its state is the live values
of the weight (nothing is stored for pruned ones) and the bias; the kernels' own layouts are derived from it whenever it
changes. Whatever happens to the module (another device, another dtype, a state dict of other values), it packs again,
and where a chosen kernel does not fit any more, dense runs and says so.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from sparta.compiler.lower import Lowering, lowering_of
from sparta.compiler.lower.subgraph import SubGraph
from sparta.errors import ShapeError, SpartaError, message
from sparta.specialize.implement import Kernel
from sparta.specialize.kernel_spec import Epilogue, KernelSpec
from sparta.specialize.runtime.handles import find, register
from sparta.specialize.scaled_linear.inputs import RoundsInputs, rounded_once, rounding_is_shared
from sparta.specialize.tuning.forgiving import ForgivingStore
from sparta.specialize.tuning.select import DENSE, Choice, build, choose
from sparta.specialize.tuning.store import key_of
from sparta.tesa.attribute import TeSA

__all__ = ["Fused", "KernelModule", "fused_of", "subgraph"]

_COMPILED = "cpu-generated"  # which takes seconds to make: too long for a call
_NEAR = 2.0  # the ratio of sizes up to which a kernel that was measured is taken without another look
_MOST_FOUND = 4096  # sizes whose kernel is remembered
_Built = tuple[int, Kernel, Sequence[Tensor]]


@dataclass(frozen=True)
class Fused:
    """What a kernel module computes: the operation, what is known of its weight, and the epilogue."""

    op: str
    weight: TeSA
    attributes: Mapping[str, Any]
    epilogue: Epilogue

    @property
    def lowering(self) -> Lowering:
        """The operation's lowering."""
        return lowering_of(self.op)


def fused_of(subgraph: SubGraph) -> Fused:
    """Return what a sub-graph computes."""
    return Fused(subgraph.lowering.op, subgraph.tesa, dict(subgraph.anchor.attributes), subgraph.epilogue)


class KernelModule(nn.Module):
    """A fused sub-graph, run by the kernel that was chosen for the size of its input.

    Parameters
    ----------
    fused
        What it computes.
    live
        The live values of the weight, in the order of its mask.
    bias
        One value an output channel, or None.
    choices
        By size, with the kernel spec that each was made for.
    """

    live: Tensor
    bias: Tensor | None

    def __init__(
        self, fused: Fused, live: Tensor, bias: Tensor | None, choices: Mapping[int, tuple[KernelSpec, Choice]]
    ) -> None:
        super().__init__()
        self.fused = fused
        self.register_buffer("live", live)
        self.register_buffer("bias", bias)
        self.choices = dict(choices)
        self.notes: list[str] = []
        self.handle = register(self)
        self._built: list[_Built] = []
        self._found: dict[int, _Built] = {}  # by size, so that nothing is searched for in a call
        self._buckets: dict[int, _Built] = {}
        self._unmeasured: dict[int, Choice] = {}  # of buckets, from the store
        self._dense: weakref.ref[Tensor] | None = None
        self._others: dict[str, KernelModule] = {}
        self.rebuild()

    @classmethod
    def of(cls, subgraph: SubGraph, choices: Mapping[int, tuple[KernelSpec, Choice]]) -> KernelModule:
        """Return the module of a sub-graph."""
        mask = subgraph.tesa.mask(subgraph.weight.device)
        bias = None if subgraph.bias is None else subgraph.bias.clone()
        return cls(fused_of(subgraph), subgraph.weight[mask].clone(), bias, choices)

    def with_attributes(self, more: Mapping[str, Any]) -> KernelModule:
        """Return this layer with more attributes, with the same tensors; made once for the same ones."""
        key = repr(sorted(more.items()))
        if key not in self._others:
            attributes = {**self.fused.attributes, **more}
            specs = {size: (replace(s, attributes=attributes), choice) for size, (s, choice) in self.choices.items()}
            self._others[key] = KernelModule(replace(self.fused, attributes=attributes), self.live, self.bias, specs)
        return self._others[key]

    def forward(self, x: Tensor, residual: Tensor | None = None, scales: Tensor | None = None) -> Tensor:
        """Return ``activation(layer(x) + bias) + residual``; with scales (M,), x is codes in fp8."""
        if scales is not None:
            return self.run_rounded(x, residual, scales)
        if torch.compiler.is_compiling():
            return cast("Tensor", torch.ops.sparta.subgraph(x, residual, self.handle))
        if rounding_is_shared() and isinstance(self._built_for(x)[0], RoundsInputs):
            codes, scales = rounded_once(x, self.fused.attributes["input_scale"])
            return self.run_rounded(codes, residual, scales)
        return self.run(x, residual)

    def run(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Run the kernel for this size, on x as it is now: Inductor writes to tensors without a trace."""
        kernel, packed = self._built_for(x)
        return self.fused.lowering.run(kernel, packed, x, self.bias, residual, self.fused.attributes)

    @property
    def rounds_inputs(self) -> bool:
        """Whether all its kernels round x to fp8, so that they can take one that is rounded already."""
        return bool(self._built) and all(isinstance(kernel, RoundsInputs) for _, kernel, _ in self._built)

    def run_rounded(self, codes: Tensor, residual: Tensor | None, scales: Tensor) -> Tensor:
        """Run the kernel for this size on codes (..., K) in fp8 with the scales (M,) of their rows."""
        lowering = self.fused.lowering
        kernel, packed = self._built_for(codes)
        if not isinstance(kernel, RoundsInputs):  # it was replaced after the graph was made
            real = codes.to(torch.float32) * scales.view(*codes.shape[:-1], 1)
            return self.run(real.to(self.live.dtype), residual)
        rows = lowering.flat(codes), scales
        y = kernel.run_rounded(packed, rows, self.bias, None if residual is None else lowering.flat(residual))
        return lowering.result(y, codes)

    def _built_for(self, x: Tensor) -> tuple[Kernel, Sequence[Tensor]]:
        """Return the kernel that runs x, and its packed weight."""
        return self.kernel_for(self.fused.lowering.size(x)) if len(self._built) > 1 else self._built[0][1:]

    def fast_path(self, size: int | None = None) -> Callable[..., Tensor] | None:
        """Return a function like :meth:`forward` that holds the kernel as it is now, with little Python around it.

        Parameters
        ----------
        size
            Of all inputs, where it is known. Without it there is no such function where sizes have kernels of their
            own, or the kernel has no short way.
        """
        if size is None and len(self._built) > 1:
            return None
        _, kernel, packed = self._built[0] if size is None else self._nearest(size)
        lowering, bias, attributes = self.fused.lowering, self.bias, self.fused.attributes
        short, run = lowering.fast_path(kernel, packed, bias), self.run
        if short is None:

            def plain(x: Tensor, residual: Tensor | None = None) -> Tensor:
                return lowering.run(kernel, packed, x, bias, residual, attributes)

            return None if size is None else plain
        bound = short

        def call(x: Tensor, residual: Tensor | None = None) -> Tensor:
            y = bound(x, residual)
            return run(x, residual) if y is None else y

        return call

    def weight(self) -> Tensor:
        """Return the weight, dense; the same tensor for as long as somebody holds it."""
        dense = None if self._dense is None else self._dense()
        if dense is None:
            mask = self.fused.weight.mask(self.live.device)
            dense = torch.zeros(mask.shape, dtype=self.live.dtype, device=self.live.device)
            dense[mask] = self.live
            self._dense = weakref.ref(dense)
        return dense

    @property
    def nbytes(self) -> int:
        """Bytes that the kernel for the first size holds: packed values, and indices where it tells."""
        _, kernel, packed = self._built[0]
        layout = kernel.layout()
        return sum(t.numel() * t.element_size() for t in packed) if layout is None else layout.nbytes

    def built(self, size: int) -> tuple[Kernel, Sequence[Tensor]]:
        """Return the kernel of a measured size and its packed weight."""
        return next((kernel, packed) for at, kernel, packed in self._built if at == size)

    def kernel_for(self, size: int) -> tuple[Kernel, Sequence[Tensor]]:
        """Return the kernel that runs activations of a size, and its packed weight."""
        return self._nearest(size)[1:]

    def rebuild(self) -> None:
        """Build and pack all kernels for the present values, device and dtype."""
        self._dense = None
        self._built, self._found, self._buckets = [], {}, {}
        held = self.weight()  # one dense tensor for all of them
        for size, (spec, choice) in self.choices.items():
            self._built.append(self._made(size, spec, choice))
        del held

    def _made(self, size: int, spec: KernelSpec, choice: Choice) -> _Built:
        """Return the kernel of a choice; sizes of one bucket with the same choice share one, packed once."""
        for other, kernel, packed in self._built:
            known, alike = self.choices[other]
            if alike.config == choice.config and (choice.implement == DENSE or key_of(known) == key_of(spec)):
                return size, kernel, packed
        return self._packed(size, spec, choice, self.weight())

    def _packed(self, size: int, spec: KernelSpec, choice: Choice, weight: Tensor) -> _Built:
        """Build and pack one kernel; dense where it does not run here."""
        wanted = _moved(spec, self.live)
        try:
            kernel = build(wanted, choice.config)
            return size, kernel, kernel.shared(kernel.pack(weight), weight)
        except SpartaError as error:
            note = f"{choice.implement} does not run on {self.live.device.type} in {self.live.dtype}: {error}"
            self.notes.append(note)
            warnings.warn(f"{note} Dense runs instead.", stacklevel=4)
            kernel = build(wanted, {"_name": DENSE})
            return size, kernel, kernel.shared(kernel.pack(weight), weight)

    def put(self, size: int, spec: KernelSpec, choice: Choice) -> None:
        """Let a kernel run activations of a size from now on."""
        built = self._made(size, spec, choice)
        self.choices = {**self.choices, size: (spec, choice)}
        self._built = [*(each for each in self._built if each[0] != size), built]
        self._found, self._buckets = {}, {}

    def drop(self, size: int) -> None:
        """Let the kernel of the nearest other size run activations of a size."""
        self.choices = {each: choice for each, choice in self.choices.items() if each != size}
        self._built = [each for each in self._built if each[0] != size]
        self._found, self._buckets = {}, {}

    def spec_for(self, x: Tensor) -> KernelSpec:
        """Return the kernel spec for an activation of this shape."""
        fused = self.fused
        device = self.live.device.type
        return fused.lowering.spec(fused.weight, x, fused.attributes, fused.epilogue, device=device)

    def choice_for(self, x: Tensor) -> Choice:
        """Return what was chosen for an activation of this size."""
        size = self._nearest(self.fused.lowering.size(x))[0]
        return self.choices[size][1] if size in self.choices else self._unmeasured[size]

    def _nearest(self, size: int) -> _Built:
        """Return the kernel of the nearest size that was measured; sizes are compared by their ratio."""
        found = self._found.get(size)
        if found is None:
            if len(self._found) >= _MOST_FOUND:
                self._found = {}
            found = self._found[size] = self._looked_up(max(1, size))
        return found

    def _looked_up(self, size: int) -> _Built:
        """Find the nearest; far from all, what is stored for such a size, or comes with the package, is asked first."""
        near = min(self._built, key=lambda each: _apart(each[0], size))
        if _apart(near[0], size) <= _NEAR or self.fused.op != "linear":
            return near
        bucket = 1 << round(math.log2(size))
        if bucket not in self._buckets:
            self._buckets[bucket] = self._stored(bucket) or near
        return self._buckets[bucket]

    def _stored(self, rows: int) -> _Built | None:
        """Return the kernel that is known to be the fastest for so many rows, None where none is."""
        x = torch.empty(rows, self.fused.weight.shape[1], dtype=self.live.dtype, device="meta")
        spec = self.spec_for(x)
        try:
            choice = choose(spec, ForgivingStore())
            known = (choice.entry is not None or choice.implement != DENSE) and choice.implement != _COMPILED
            self._unmeasured[rows] = choice
            return self._packed(rows, spec, choice, self.weight()) if known else None
        except Exception:  # noqa: BLE001 - a store of anyone's; the nearest kernel runs
            return None

    # ------------------------------------------------------------------ nn.Module's ways to change it

    def _apply(self, fn: Any, recurse: bool = True) -> KernelModule:  # noqa: FBT001, FBT002 - PyTorch's protocol
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.rebuild()
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        given = state_dict.get(f"{prefix}live")
        if given is not None and given.shape != self.live.shape:
            raise ShapeError(
                message(
                    f"{prefix}live of {given.numel()} values",
                    f"{self.live.numel()}, as the mask that was compiled has",
                    "compile the model with the other mask again",
                )
            )
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.rebuild()

    def __deepcopy__(self, memo: dict[int, Any]) -> KernelModule:
        bias = None if self.bias is None else self.bias.clone()
        copy = KernelModule(self.fused, self.live.clone(), bias, self.choices)
        memo[id(self)] = copy
        return copy

    def extra_repr(self) -> str:
        """Say what runs."""
        runs = ", ".join(f"{size}: {choice}" for size, (_, choice) in self.choices.items())
        return f"{self.fused.op}, density {self.fused.weight.density:.3g}, {self.fused.epilogue}, {runs}"


def _apart(one: int, two: int) -> float:
    return max(one, two) / max(1, min(one, two))


def _moved(spec: KernelSpec, like: Tensor) -> KernelSpec:
    """Return a kernel spec for the device and dtype of a tensor."""
    now = str(spec["input"].format)
    if spec.device == like.device.type and now == str(TeSA.dense((1,), format=like.dtype).format):
        return spec
    # A weight in another format than the activations, such as int8, keeps it.
    operands = {
        name: tesa.with_format(like.dtype) if str(tesa.format) == now else tesa for name, tesa in spec.operands.items()
    }
    return KernelSpec(spec.op, operands, spec.epilogue, spec.attributes, like.device.type)


def _module(handle: int) -> KernelModule:
    return find(handle, KernelModule, fix="keep the compiled model")


@torch.library.custom_op("sparta::subgraph", mutates_args=())
def subgraph(x: Tensor, residual: Tensor | None, handle: int) -> Tensor:
    """Return what the kernel module with this handle makes of x; how `torch.compile` reaches a kernel."""
    return _module(handle).run(x, residual)


@subgraph.register_fake
def _(x: Tensor, residual: Tensor | None, handle: int) -> Tensor:
    del residual
    module = _module(handle)
    fused, dtype = module.fused, module.live.dtype
    weight = torch.empty(fused.weight.shape, dtype=dtype, device=x.device)
    result = fused.lowering.dense(weight, x.to(dtype), None, fused.attributes)
    return result.new_empty(result.shape, dtype=fused.lowering.result_dtype(dtype, fused.attributes))
