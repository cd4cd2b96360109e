"""Implements: the ways to run a kernel spec, and the one registry in which they stand side by side.

Hand-written, library and generated kernels, and plain dense, are all an :class:`Implement` with a predicate, a search
space and a builder. An implement never decides that it is the best; it only says whether it can, and measurement
chooses. A new one is one new file: in this package with a line in :mod:`sparta.specialize.builtin`, elsewhere with
``@register`` above its class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from sparta.common.tuning import TunableItemCfg
from sparta.errors import NameNotFoundError, SpartaError, ValueRangeError, did_you_mean, message
from sparta.specialize.kernel_spec import KernelSpec

__all__ = [
    "Cause",
    "DenseImplement",
    "Implement",
    "Kernel",
    "KernelLayout",
    "Support",
    "TiledImplement",
    "implement_named",
    "implements_of",
    "present",
    "register",
    "search_space",
    "supported",
]

Params = Mapping[str, Any]


class Cause(StrEnum):
    """What kind of obstacle keeps an implement from running a kernel spec: what programs decide by."""

    DEVICE = "device"
    """It runs on another kind of device, or there is no such device."""
    DTYPE = "dtype"
    """It does not compute in this bit format."""
    SHAPE = "shape"
    """Too small, too large, ragged, or another number of rows than pays."""
    PATTERN = "pattern"
    """The zeros are too few, or in the wrong places."""
    EPILOGUE = "epilogue"
    """It does not know what comes after the product."""
    CAPABILITY = "capability"
    """The device lacks an instruction or a unit that it needs."""
    MISSING_TOOL = "missing tool"
    """A compiler or a library that could be installed is not there."""
    OTHER = "other"
    """None of these, or an older file that does not say."""


@dataclass(frozen=True)
class Support:
    """Whether an implement can run a kernel spec, with a reason that a person can read and its cause for programs.

    >>> answer = Support.no("no CUDA device", Cause.DEVICE)
    >>> bool(answer), answer.reason, answer.cause.name
    (False, 'no CUDA device', 'DEVICE')
    """

    ok: bool
    reason: str
    cause: Cause | None = None

    @staticmethod
    def yes(reason: str = "supported") -> Support:
        """Return a yes."""
        return Support(ok=True, reason=reason)

    @staticmethod
    def no(reason: str, cause: Cause = Cause.OTHER) -> Support:
        """Return a no with its reason and the kind of obstacle."""
        return Support(ok=False, reason=reason, cause=cause)

    def to_dict(self) -> dict[str, str]:
        """Return a no as JSON values."""
        return {"reason": self.reason, "cause": (self.cause or Cause.OTHER).value}

    @staticmethod
    def from_dict(fields: object) -> Support:
        """Return the no that was stored, or that an older version stored as its reason alone.

        >>> Support.from_dict(Support.no("no CUDA device", Cause.DEVICE).to_dict()).cause.name
        'DEVICE'
        """
        if not isinstance(fields, Mapping):
            return Support.no(str(fields))
        known = {each.value: each for each in Cause}
        return Support.no(str(fields.get("reason", "")), known.get(str(fields.get("cause")), Cause.OTHER))

    def __bool__(self) -> bool:
        return self.ok


@dataclass(frozen=True)
class KernelLayout:
    """What a kernel reads beside what it packed, for programs that run it elsewhere.

    Attributes
    ----------
    arrays
        Index arrays by name.
    launch
        Instruction set, tile and sizes, as JSON values.
    nbytes
        Bytes that one run reads: index arrays and packed values.
    """

    arrays: Mapping[str, Tensor]
    launch: Mapping[str, Any]
    nbytes: int


class Kernel(ABC):
    """A built kernel of one operation: it packs the sparse operand once and then runs on any dynamic size.

    What `pack` returns is all the run-time state there is; it holds plain tensors, so that modules can keep it in
    buffers, move it between devices and copy it. Where the sparse operand is a weight, those are its live values; where
    it is an input or a result, only its mask is known beforehand, and what is packed is the index of that mask.
    """

    @abstractmethod
    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        """Return the sparse operand in this kernel's own layout, on its device."""

    @abstractmethod
    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        """Run the operator; which inputs it takes is the operation's convention (see the operation's file)."""

    def shared(self, packed: Sequence[Tensor], operand: Tensor) -> Sequence[Tensor]:
        """Return what was packed, with the operand's own memory in the place of equal copies of it.

        Asked for weights that are not trained, so that two of the same are not kept. Here nothing is shared.
        """
        del operand
        return packed

    def fast_path(self, packed: Sequence[Tensor], bias: Tensor | None) -> Callable[..., Tensor | None] | None:
        """Return a short way to run with this packed weight and this bias again and again, where there is one.

        It takes x, of any leading dims where the operation takes rows, and a residual or nothing. It returns None for
        tensors that it does not take. Only operations with a weight and a bias have one.
        """
        del packed, bias
        return None

    def product(self, packed: Sequence[Tensor], bias: Tensor | None) -> Any:
        """Return this kernel as a step of a chain (:mod:`sparta.specialize.cpu.chain`); None where it cannot be one."""
        del packed, bias
        return None

    def layout(self) -> KernelLayout | None:
        """Return what this kernel reads beside what it packed; None, as here, where nothing can be told."""
        return None


def present(*inputs: Tensor | None) -> tuple[Tensor, ...]:
    """Return the inputs of a kernel that its operation's convention says are there.

    >>> len(present(Tensor(), Tensor()))
    2
    """
    if any(tensor is None for tensor in inputs):
        raise ValueRangeError(message("a kernel was run without one of its inputs", "a tensor for each"))
    return tuple(tensor for tensor in inputs if tensor is not None)


class Implement(ABC):
    """One way to run kernel specs of one operation.

    Attributes
    ----------
    name
        Unique among the implements of one operation, shown to users and stored with tuning results.
    op
        The operation it runs.
    version
        Raised when its parameters or its speed change, so that stored tuning results are measured again.
    first_run_compiles
        Whether a kernel is compiled at its first run and not by `build`; the tuner then runs several candidates once,
        side by side, before it times any.
    every_epilogue
        Whether it runs whatever an epilogue may say; others get no ReLU6, and no ReLU after a residual.
    any_mask
        Whether it takes every mask on its device, so that people want to know why it cannot run a layer.
    """

    name: ClassVar[str]
    op: ClassVar[str]
    version: ClassVar[int] = 1
    first_run_compiles: ClassVar[bool] = False
    every_epilogue: ClassVar[bool] = False
    any_mask: ClassVar[bool] = False

    def answer(self, spec: KernelSpec) -> Support:
        """Say whether this implement can run `spec` with its epilogue, or why not; found out once for each spec."""
        known: dict[Implement, Support] = spec.__dict__.setdefault("_answers", {})
        if self not in known:
            known[self] = self._answer(spec)
        return known[self]

    def _answer(self, spec: KernelSpec) -> Support:
        epilogue = spec.epilogue
        if not self.every_epilogue and (epilogue.residual_first or epilogue.activation == "relu6"):
            return Support.no(f"it does not know the epilogue {epilogue}", Cause.EPILOGUE)
        return self.supports(spec)

    @abstractmethod
    def supports(self, spec: KernelSpec) -> Support:
        """Say whether this implement can run `spec`, whatever its epilogue, or why not."""

    def space(self, spec: KernelSpec) -> Mapping[str, TunableItemCfg]:
        """Return the parameters to try for `spec`; empty, as here, when there is nothing to tune."""
        del spec
        return {}

    def default(self, spec: KernelSpec) -> dict[str, Any]:
        """Return parameters that are good without tuning; empty, as here, when there is nothing to tune."""
        del spec
        return {}

    @abstractmethod
    def build(self, spec: KernelSpec, params: Params) -> Kernel:
        """Compile for `spec` with these parameters; raises :class:`SpartaError` where that cannot be done."""


class DenseImplement(Implement):
    """PyTorch's own way to run an operation, which takes every spec and has nothing to tune."""

    name = "dense"

    def supports(self, spec: KernelSpec) -> Support:
        """Dense runs everything."""
        return Support.yes(f"PyTorch runs any {spec.op}")


class TiledImplement(Implement):
    """An implement whose only parameter is its tile, written as text."""

    @abstractmethod
    def tiles(self, spec: KernelSpec) -> Sequence[object]:
        """Return the tiles that are worth timing for `spec`, the best guess first."""

    def space(self, spec: KernelSpec) -> Mapping[str, TunableItemCfg]:
        """Return the tiles that are worth timing."""
        return {"tile": TunableItemCfg("choice", _value=[str(tile) for tile in self.tiles(spec)])}

    def default(self, spec: KernelSpec) -> dict[str, Any]:
        """Return the best guess."""
        return {"tile": str(self.tiles(spec)[0])}


_REGISTRY: dict[tuple[str, str], Implement] = {}
_T = TypeVar("_T", bound=type[Implement])


def register(cls: _T) -> _T:
    """Class decorator: put an implement into the registry, after those that come with the package."""
    registry = _registry()
    if (cls.op, cls.name) in registry:
        given = f"an implement of {cls.op} named {cls.name!r} is registered already"
        raise ValueRangeError(message(given, fix="rename one"))
    registry[cls.op, cls.name] = cls()
    return cls


def _registry() -> dict[tuple[str, str], Implement]:
    """Return the registry; the package's own implements are the first in it, in the order of their list."""
    if not _REGISTRY:
        own = import_module("sparta.specialize.builtin").IMPLEMENTS
        _REGISTRY.update({(cls.op, cls.name): cls() for cls in own})
    return _REGISTRY


def implements_of(op: str) -> list[Implement]:
    """Return all implements of an operation, in the order of their registration.

    Raises :class:`NameNotFoundError` with the registration that is missing when there is none.
    """
    registry = _registry()
    found = [implement for implement in registry.values() if implement.op == op]
    if not found:
        known = {implement.op for implement in registry.values()}
        raise NameNotFoundError(
            did_you_mean(op, known, "operation")
            + f" To add it, register an Implement with op = {op!r} (see sparta.specialize.implement)."
        )
    return found


def implement_named(name: str, op: str) -> Implement:
    """Return the implement of an operation that has this name."""
    found = {implement.name: implement for implement in implements_of(op)}
    if name not in found:
        raise NameNotFoundError(did_you_mean(name, found, f"implement of {op}"))
    return found[name]


def supported(spec: KernelSpec) -> tuple[list[Implement], dict[str, Support]]:
    """Return the implements that can run `spec`, and for each other one why it cannot."""
    able, refused = [], {}
    for implement in implements_of(spec.op):
        answer = implement.answer(spec)
        if answer:
            able.append(implement)
        else:
            refused[implement.name] = answer
    if not able:
        raise SpartaError(
            message(
                f"no implement runs {spec}", fix="; ".join(f"{name}: {why.reason}" for name, why in refused.items())
            )
        )
    return able, refused


def search_space(spec: KernelSpec) -> TunableItemCfg:
    """Return the nested choice over the implements that can run `spec` and their parameters."""
    able, _ = supported(spec)
    return TunableItemCfg(
        "choice", _is_nested=True, _value={implement.name: dict(implement.space(spec)) for implement in able}
    )
