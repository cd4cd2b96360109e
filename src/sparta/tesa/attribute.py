"""TeSA, the Tensor-with-Sparsity-Attribute: what is known of each element of a tensor before the program runs.

Every element is *live* (nothing known), a *constant* c, or *dead* (never observed), and has a bit format. Each of these
facts is stored as a :class:`~sparta.tesa.grid.Grid`, so the cost follows the knowledge. A TeSA is immutable and
describes a tensor without holding it; the grids and their shape operations are those of
:class:`~sparta.tesa.bundle.GridBundle`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from sparta.errors import ShapeError, ValueRangeError, message
from sparta.tesa import algebra, describe
from sparta.tesa.bits import ANY, FORMATS, BitFormat, bit_format, format_of_bits, parameter_grid
from sparta.tesa.bundle import GridBundle
from sparta.tesa.grid import Grid
from sparta.tesa.mask import as_mask
from sparta.tesa.patterns import Block, Channel, Detection, Pattern, as_pattern, detect

__all__ = ["TeSA", "live_cells"]

LIVE, CONSTANT, DEAD = algebra.LIVE, algebra.CONSTANT, algebra.DEAD
_STATES = {"live": LIVE, "constant": CONSTANT, "dead": DEAD}
_OF_LIVE = ("_live", "density", "pattern")  # properties of the live elements alone
_MANY = 1 << 20  # cells from which on a GPU answers sooner
_T = TypeVar("_T")


@dataclass(frozen=True, eq=False, repr=False)
class TeSA(GridBundle):
    """What is known of each element of a tensor of `shape`.

    Make one with :meth:`from_mask`, :meth:`from_zeros`, :meth:`from_pattern`, :meth:`from_bits`, :meth:`dense`,
    :meth:`constant` or :meth:`dead`, and refine it with :meth:`with_format` and :meth:`with_dynamic`.

    Parameters
    ----------
    state
        Grid of uint8: 0 live, 1 constant, 2 dead.
    value
        Grid of float64: the constant; 0 where the state is not constant.
    code
        Grid of uint8: position of the bit format in :data:`sparta.tesa.bits.FORMATS`.
    scale, zero_point
        Grids of float64: quantisation parameters; a scale of +inf means that none is known. The block of the
        grid is the quantisation group.
    dynamic
        Dims whose size may change at run time. Nothing may vary along them.

    Examples
    --------
    >>> mask = torch.zeros(64, 64, dtype=torch.bool)
    >>> mask[:32, :32] = True
    >>> tesa = TeSA.from_mask(mask, format="bf16")
    >>> print(tesa)
    TeSA 64×64, block 32×32, density 0.25, bf16
    >>> tesa.entries
    4
    """

    # ------------------------------------------------------------------ making

    @classmethod
    def dense(
        cls,
        shape: Sequence[int],
        *,
        format: BitFormat | str | torch.dtype | None = None,
        dynamic: Iterable[int] = (),
    ) -> TeSA:
        """Return the TeSA of a tensor of which no element is known: all live."""
        return cls._uniform(shape, LIVE, 0.0, format, dynamic)

    @classmethod
    def constant(cls, shape: Sequence[int], value: float, *, dynamic: Iterable[int] = ()) -> TeSA:
        """Return the TeSA of a tensor whose every element is known to be `value`."""
        return cls._uniform(shape, CONSTANT, float(value), None, dynamic)

    @classmethod
    def dead(cls, shape: Sequence[int], *, dynamic: Iterable[int] = ()) -> TeSA:
        """Return the TeSA of a tensor whose elements are never observed."""
        return cls._uniform(shape, DEAD, 0.0, None, dynamic)

    @classmethod
    def from_mask(
        cls,
        mask: Tensor,
        *,
        pruned: str = "constant",
        value: float = 0.0,
        format: BitFormat | str | torch.dtype | None = None,
        dynamic: Iterable[int] = (),
    ) -> TeSA:
        """Return the TeSA of a masked tensor: live where `mask` is true, pruned elsewhere.

        Parameters
        ----------
        mask
            bool or 0/1 tensor of the tensor's shape, of any stride, on any device.
        pruned
            What an element outside the mask is: ``"constant"`` (of `value`, by default 0) or ``"dead"``.

        Examples
        --------
        >>> TeSA.from_mask(torch.tensor([[1, 0], [1, 0]])).density
        0.5
        """
        state = _STATES.get(pruned)
        if state not in {CONSTANT, DEAD}:
            raise ValueRangeError(message(f"pruned={pruned!r}", "'constant' or 'dead'"))
        grid = Grid.from_dense(as_mask(mask))
        states = Grid(grid.shape, grid.block, grid.cells.logical_not().to(torch.uint8).mul_(state))
        return cls._of_states(states, value if state == CONSTANT else 0.0, format, dynamic)

    @classmethod
    def from_block_mask(
        cls,
        kept_blocks: Tensor,
        shape: Sequence[int],
        block: Sequence[int],
        *,
        format: BitFormat | str | None = None,
    ) -> TeSA:
        """Return the TeSA of a tensor pruned in blocks, from one flag per block.

        Parameters
        ----------
        kept_blocks
            bool tensor of shape ``ceil(shape / block)``: which blocks are live.
        """
        cells = torch.where(as_mask(kept_blocks), LIVE, CONSTANT).to("cpu", torch.uint8)
        grid = Grid(tuple(shape), tuple(min(b, max(1, s)) for b, s in zip(block, shape, strict=True)), cells)
        return cls._of_states(grid.canonical(), 0.0, format, ())

    @classmethod
    def from_zeros(cls, tensor: Tensor) -> TeSA:
        """Return the TeSA of `tensor` as it is: zeros are constants, the rest live in the tensor's own format."""
        if tensor.is_meta:
            raise ValueRangeError(message("a tensor on the meta device, which has no values", "a tensor with data"))
        return cls.from_mask(tensor != 0, format=tensor.dtype if tensor.dtype is not torch.bool else None)

    @classmethod
    def from_pattern(cls, pattern: Pattern | str, score: Tensor, sparsity: float | None = None) -> TeSA:
        """Return the TeSA that keeps the highest scores under `pattern`.

        >>> TeSA.from_pattern("2:4", torch.rand(8, 16)).density
        0.5
        """
        return cls.from_mask(as_pattern(pattern).project(score, sparsity))

    @classmethod
    def from_bits(cls, bits: Tensor) -> TeSA:
        """Return the TeSA for a tensor of widths: 0 pruned, 4 int4, 8 int8, 16 fp16, 32 fp32, 64 fp64.

        The original's other codes work as well: 7 uint8, 31 int32, 33 live in any format.

        >>> print(TeSA.from_bits(torch.tensor([[0, 8], [4, 8]])))
        TeSA 2×2, unstructured, density 0.75, int4 25%, int8 50%
        """
        if bits.is_floating_point() or bits.is_complex():
            raise ValueRangeError(message(f"bits of dtype {bits.dtype}", "an integer tensor"))
        grid = Grid.from_dense(bits)
        codes = torch.full(grid.cells.shape, ANY.code, dtype=torch.uint8)
        for width in torch.unique(grid.cells).tolist():
            if width:
                codes[grid.cells == width] = format_of_bits(width).code
        states = Grid(grid.shape, grid.block, torch.where(grid.cells != 0, LIVE, CONSTANT).to(torch.uint8))
        tesa = cls._of_states(states.canonical(), 0.0, None, ())
        return replace(tesa, code=Grid(grid.shape, grid.block, codes).canonical())

    @classmethod
    def _uniform(
        cls,
        shape: Sequence[int],
        state: int,
        value: float,
        format: BitFormat | str | torch.dtype | None,
        dynamic: Iterable[int],
    ) -> TeSA:
        return cls._of_states(Grid.uniform(shape, state, torch.uint8), value, format, dynamic)

    @classmethod
    def _of_states(
        cls, states: Grid, value: float, format: BitFormat | str | torch.dtype | None, dynamic: Iterable[int]
    ) -> TeSA:
        shape = states.shape
        if value:
            values = torch.where(states.cells == CONSTANT, float(value), 0.0).to(torch.float64)
            constants = Grid(shape, states.block, values).canonical()
        else:  # also -0.0: both are "zero" to everyone who asks
            constants = Grid.uniform(shape, 0.0, torch.float64)
        return cls(
            state=states,
            value=constants,
            code=Grid.uniform(shape, bit_format(format).code, torch.uint8),
            scale=Grid.uniform(shape, math.inf, torch.float64),
            zero_point=Grid.uniform(shape, 0.0, torch.float64),
            dynamic=frozenset(dynamic),
        )

    def with_format(
        self,
        format: BitFormat | str | torch.dtype | None,
        *,
        scale: float | Tensor | None = None,
        zero_point: float | Tensor = 0,
        group: int | Sequence[int] | None = None,
    ) -> Self:
        """Return the same TeSA with another bit format, with its quantisation parameters if it has any.

        Parameters
        ----------
        scale
            A number, one value per output channel (1-D, of ``shape[0]``), or one per group.
        zero_point
            A number, or a tensor of the shape of `scale`.
        group
            How many neighbouring elements of the last dim share a scale, or the group's size along every dim.

        Examples
        --------
        >>> weight = TeSA.dense((64, 256)).with_format("int4", scale=torch.full((64, 2), 0.1), group=128)
        >>> weight.scale.block
        (64, 256)
        """
        chosen = bit_format(format)
        if scale is None and self._is_plain(chosen):
            return self  # with what has been found out about it
        code = Grid.uniform(self.shape, chosen.code, torch.uint8)
        if scale is None:
            unknown = Grid.uniform(self.shape, math.inf, torch.float64)
            zero = Grid.uniform(self.shape, 0.0, torch.float64)
            return self._telling(replace(self, code=code, scale=unknown, zero_point=zero))
        scales = parameter_grid(self.shape, scale, group, "scale")
        if not bool(((scales.cells > 0) & scales.cells.isfinite()).all()):
            raise ValueRangeError(message("a scale that is not a positive finite number", "scales > 0"))
        zeros = parameter_grid(self.shape, zero_point, group, "zero_point")
        return self._telling(replace(self, code=code, scale=scales, zero_point=zeros))

    def _telling(self, other: Self) -> Self:
        """Return a TeSA with the same live elements, told what has been found out about these."""
        other.__dict__.update({name: self.__dict__[name] for name in _OF_LIVE if name in self.__dict__})
        other.__dict__["found"] = self.found
        return other

    def _is_plain(self, chosen: BitFormat) -> bool:
        """Whether all elements have one bit format, without quantisation parameters."""
        grids = (self.code, self.scale, self.zero_point)
        return all(grid.cells.numel() == 1 for grid in grids) and [grid.value() for grid in grids] == [
            chosen.code,
            math.inf,
            0.0,
        ]

    def with_dynamic(self, *dims: int) -> Self:
        """Return the same TeSA with exactly these dims dynamic (negative dims count from the end)."""
        return replace(self, dynamic=frozenset(self._dim(d) for d in dims))

    # ------------------------------------------------------------------ asking

    @property
    def entries(self) -> int:
        """Number of stored cells beyond one per grid: what the knowledge costs."""
        return max(1, sum(g.cells.numel() for g in self._grids() if not g.is_uniform))

    def count(self, state: str = "live") -> int:
        """Return how many elements are ``"live"``, ``"constant"`` or ``"dead"``."""
        if state not in _STATES:
            raise ValueRangeError(message(f"state {state!r}", "'live', 'constant' or 'dead'"))
        return self._live if state == "live" else self._where(_STATES[state]).count()

    @cached_property
    def _live(self) -> int:
        return self.answered(lambda state: live_cells(state).count())

    @cached_property
    def density(self) -> float:
        """Fraction of the elements that are live (1.0 for a tensor without elements)."""
        return self.count("live") / self.numel if self.numel else 1.0

    @property
    def sparsity(self) -> float:
        """Fraction of the elements that are not live."""
        return 1.0 - self.density

    @property
    def format(self) -> BitFormat | None:
        """The one bit format of all live elements, or None where they differ."""
        found = self.formats()
        return next(iter(found)) if len(found) == 1 else (ANY if not found else None)

    def formats(self) -> dict[BitFormat, int]:
        """Return how many live elements have each bit format, fewest bits first."""
        if self.code.is_uniform:
            live = self.count("live")
            return {FORMATS[self.code.value()]: live} if live else {}
        coded = Grid.combine(lambda s, c: torch.where(s == LIVE, c + 1, 0), self.state, self.code)
        counts = {f: Grid(coded.shape, coded.block, coded.cells == f.code + 1).count() for f in FORMATS}
        return {f: count for f, count in counts.items() if count}

    @cached_property
    def found(self) -> dict[str, Any]:
        """What others have found out about the live elements, which is the same in any bit format."""
        return {}

    @cached_property
    def pattern(self) -> Detection:
        """The most regular pattern that the live elements obey, and the density inside it."""
        return self.answered(self._detected)

    def answered(self, question: Callable[[Grid], _T]) -> _T:
        """Return the answer to a question about the state: from :meth:`soon`, or the CPU where a GPU has no room."""
        try:
            return question(self.soon())
        except torch.OutOfMemoryError:
            return question(self.state)

    def soon(self) -> Grid:
        """Return the state where questions about all of it are answered soonest: on a GPU that is in use, if large."""
        cells, used = self.state.cells, bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
        if cells.numel() < _MANY or not used or torch.cuda.is_current_stream_capturing():
            return self.state
        return Grid(self.shape, self.state.block, cells.cuda())

    def _detected(self, state: Grid) -> Detection:
        varying = [d for d in range(self.ndim) if state.varies_along(d)]
        exact: Pattern | None = None
        if len(varying) == 1 and self.ndim > 1:
            exact = Channel(varying[0])
        elif len(varying) == 2 and math.prod(state.block[d] for d in varying) >= 4:
            h, w = (state.block[d] for d in varying)
            exact = Block(h, w, axes=(varying[0], varying[1]))
        if exact is not None and bool((state.cells != LIVE).any()) and bool((state.cells == LIVE).any()):
            return Detection(exact, self.density, 1.0)
        live = live_cells(state)
        return detect(live.cells if state.is_uniform else live.dense())

    def mask(self, device: torch.device | str | None = None) -> Tensor:
        """Return the bool tensor of live elements, a fresh one of the full shape."""
        cells = self.state.cells if device is None else self.state.cells.to(device)  # compared where it is wanted
        return live_cells(Grid(self.shape, self.state.block, cells)).dense()

    def picture(self, cells: int = 24) -> tuple[tuple[float, ...], ...]:
        """Return the density in each cell of a coarse grid over the first axis and all others, for people to look at.

        >>> TeSA.from_mask(torch.eye(4, dtype=torch.bool)).picture(2)
        ((0.5, 0.0), (0.0, 0.5))
        """
        if not self.ndim or not math.prod(self.shape):
            return ()
        flat = self.mask().reshape(self.shape[0], -1)
        rows, columns = (min(cells, size) for size in flat.shape)
        pooled = torch.nn.functional.adaptive_avg_pool2d(flat.float()[None], (rows, columns))[0]
        return tuple(tuple(round(cell, 2) for cell in row) for row in pooled.tolist())

    def states(self, device: torch.device | str | None = None) -> Tensor:
        """Return the uint8 tensor of states: 0 live, 1 constant, 2 dead."""
        return self.state.dense(device)

    def values(self, device: torch.device | str | None = None) -> Tensor:
        """Return the float64 tensor of constants; NaN where an element is not a constant."""
        known = Grid.combine(lambda s, v: torch.where(s == CONSTANT, v, math.nan), self.state, self.value)
        return known.dense(device)

    def bits(self, default: BitFormat | str = "fp32", device: torch.device | str | None = None) -> Tensor:
        """Return the int16 tensor of widths: 0 where pruned, those of `default` where the format is not known."""
        widths = torch.tensor([f.bits for f in FORMATS], dtype=torch.int16)
        widths[ANY.code] = bit_format(default).bits
        live = Grid.combine(
            lambda s, c: torch.where(s == LIVE, widths[c.long()], 0).to(torch.int16), self.state, self.code
        )
        return live.dense(device)

    def kept_blocks(self, block: Sequence[int]) -> Tensor:
        """Return, for each block, whether it has a live element: bool of shape ``ceil(shape / block)``."""
        return self.answered(lambda state: live_cells(state).any_in_blocks(block).cpu())

    # ------------------------------------------------------------------ using

    def apply(self, tensor: Tensor) -> Tensor:
        """Return `tensor` with constants in their places and zeros where it is dead; live elements are untouched."""
        self._check_shape(tensor)
        if self.count("live") == self.numel:
            return tensor.clone()
        live = self.mask(tensor.device)
        if self.value.is_uniform and not self.value.value():
            return torch.where(live, tensor, torch.zeros((), dtype=tensor.dtype, device=tensor.device))
        return torch.where(live, tensor, self.value.dense(tensor.device).to(tensor.dtype))

    def violations(self, tensor: Tensor) -> int:
        """Return how many constants of this TeSA the tensor does not hold (dead and live elements may be anything)."""
        self._check_shape(tensor)
        known = self._where(CONSTANT)
        if known.count() == 0:
            return 0
        wanted = self.value.dense(tensor.device).to(tensor.dtype)
        wrong = (tensor.detach() != wanted) & ~(tensor.detach().isnan() & wanted.isnan())
        return int((wrong & known.dense(tensor.device)).sum())

    # ------------------------------------------------------------------ the algebra (see `sparta.tesa.algebra`)

    def join(self, other: TeSA) -> TeSA:
        """Return all that is known by either: the union of the pruned, the minimum of the bits. Also ``a | b``."""
        return algebra.join(self, other)

    def meet(self, other: TeSA) -> TeSA:
        """Return what both agree on: the intersection of the pruned, the maximum of the bits. Also ``a & b``."""
        return algebra.meet(self, other)

    def __or__(self, other: TeSA) -> TeSA:
        return algebra.join(self, other)

    def __and__(self, other: TeSA) -> TeSA:
        return algebra.meet(self, other)

    def __le__(self, other: TeSA) -> bool:
        """Whether `other` knows at least all that this one knows."""
        return algebra.join(self, other) == other

    def conflicts(self, other: TeSA) -> int:
        """Return for how many elements the two claim different constants or different quantisation parameters."""
        return algebra.conflicts(self, other)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TeSA):
            return NotImplemented
        return (
            self.shape == other.shape
            and self.dynamic == other.dynamic
            and all(a.same_as(b) for a, b in zip(self._grids(), other._grids(), strict=True))
        )

    def __hash__(self) -> int:
        return hash(self.digest)

    @cached_property
    def digest(self) -> str:
        """A stable hexadecimal digest of all that the TeSA says; equal TeSAs have equal digests."""
        sha = hashlib.sha256(repr((self.shape, sorted(self.dynamic))).encode())
        for grid in self._grids():
            plain = grid.canonical()
            sha.update(repr(plain.block).encode())
            sha.update(plain.cells.contiguous().numpy().tobytes())
        return sha.hexdigest()

    # ------------------------------------------------------------------ telling a person

    def describe_pattern(self) -> str:
        """Return the pattern of the live elements in words: ``"dense"``, ``"block 32×32"``, ``"2:4"``."""
        return describe.pattern(self)

    def describe_bits(self) -> str:
        """Return the bit formats in words: ``"int8, scale per 1×128"``, ``"int4 25%, int8 50%"``."""
        return describe.bits(self)

    def __str__(self) -> str:
        return describe.tesa(self)

    def __repr__(self) -> str:
        return f"<{self}>"

    # ------------------------------------------------------------------ inside

    def _where(self, state: int) -> Grid:
        return Grid(self.shape, self.state.block, self.state.cells == state)

    def _check_shape(self, tensor: Tensor) -> None:
        if tuple(tensor.shape) != self.shape:
            raise ShapeError(
                message(f"a tensor of shape {tuple(tensor.shape)} for {self}", f"a tensor of shape {self.shape}")
            )


def live_cells(state: Grid) -> Grid:
    """Return which cells of a grid of states are live.

    >>> live_cells(TeSA.from_mask(torch.tensor([True, False])).state).cells.tolist()
    [True, False]
    """
    return Grid(state.shape, state.block, state.cells == LIVE)
