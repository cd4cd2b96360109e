"""Dense convolutions of the kernel library: the weight packed once, nothing of it skipped, images as they come.

They stand beside the sparse ones so that a network of both is one chain, without a change of layout between its layers.
A depthwise layer, with one input channel for each group, has a kernel of its own; see :class:`DepthwiseConv`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sparta.errors import ShapeError, ValueRangeError, message
from sparta.specialize.conv.cpu_image import ImagePlan, plan_image
from sparta.specialize.conv.cpu_winograd import Winograd, packed_blocks, takes_winograd
from sparta.specialize.conv.spec import ConvGeometry
from sparta.specialize.cpu.chain import ImageProduct, Step, StepKind
from sparta.specialize.cpu.device import DTYPES
from sparta.specialize.cpu.library import DENSE_CONV_CALL, DEPTHWISE_CALL, activation_code, load, raise_for
from sparta.specialize.cpu.packing import is_float

__all__ = ["DenseConv", "DepthwiseConv", "ImagesPlan", "PackedImages", "dense_images"]

_KEPT = 8  # sizes of images whose plans are kept
_PADDING = 16  # values that a kernel may load beyond the last one
_COPY_FLOATS = 96 * 1024  # of a band's copy, which shares the second level of caches with weights
_REAL_RESULT = (0, 0.0, 0, 0, 0)  # of a depthwise layer: no second result, and none in bytes
_LEAST_TILES = 4  # of a band whose sums are stored in parts
_FEW_CHANNELS = 4  # input channels whose taps are read where they are: see native/few_channels.h
_FEW_FLOATS = 18 * 1024  # of the copy of a band then
# Bytes that a tile reads before it goes on to the next columns, so that they stay in the nearest cache.
_CHUNK_BYTES = 24 * 1024


@dataclass(frozen=True)
class ImagesPlan:
    """What calls for contiguous images of one shape share: the result's shape, and a call without its first fields."""

    shape: tuple[int, ...]
    rest: tuple[Any, ...]
    alive: tuple[Any, ...] = ()


class PackedImages(ABC):
    """A dense convolution of contiguous images; see :func:`dense_images`.

    Parameters
    ----------
    shape
        Of the weight: (N, C / groups, KH, KW) or (N, C / groups, K).
    geometry
        Strides, padding, dilation, groups.
    isa
        Instruction set; None for the best.
    """

    kind: StepKind

    def __init__(self, shape: tuple[int, ...], geometry: ConvGeometry, isa: str | None = None) -> None:
        if len(shape) != len(geometry.stride) + 2 or 0 in shape or shape[0] % geometry.groups:
            given = f"a weight of shape {shape} for {geometry}"
            raise ShapeError(message(given, "(N, C / groups, ...) with as many dims after those as strides"))
        self.shape, self.geometry, self.library = shape, geometry, load(isa)
        self.channels = shape[1] * geometry.groups
        self._dims = len(shape) - 2
        # A 1-d convolution is a 2-d one over images with one row.
        self._kernel = (1, shape[2]) if self._dims == 1 else (shape[2], shape[3])
        one = self._dims == 1
        self._stride = (1, *geometry.stride) if one else geometry.stride
        self._padding = ((0, 0), *geometry.padding) if one else geometry.padding
        self._dilation = (1, *geometry.dilation) if one else geometry.dilation
        self._plans: dict[tuple[Any, ...], ImagesPlan] = {}

    @abstractmethod
    def pack(self, weight: Tensor) -> Tensor:
        """Return the values of a weight in the order the kernel reads."""

    @abstractmethod
    def _planned(self, shape: tuple[int, ...], threads: int) -> ImagesPlan:
        """Return the plan for images of this shape."""

    @abstractmethod
    def _filled(
        self, ends: tuple[int, int, int, int], plan: ImagesPlan, values: Tensor, activation: int, threads: int
    ) -> bytes:
        """Return a call; ends are the addresses of x, y, bias and residual."""

    @abstractmethod
    def _run(self, call: bytes) -> int:
        """Run a call of the library."""

    def __call__(
        self,
        x: Tensor,
        values: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        residual: Tensor | None = None,
        threads: int | None = None,
    ) -> Tensor:
        """Return ``activation(conv(x, W) + bias) + residual``, contiguous.

        Parameters
        ----------
        x
            (B, C, H, W) or (B, C, L), with any strides.
        values
            What :meth:`pack` returned.
        activation
            ``'relu'``, ``'gelu'``, ``'silu'``, ``'relu6'``, ``'relu_last'`` (a ReLU after the residual) or None.
        """
        images, code = self._checked(x, "x", None), activation_code(activation)
        count = torch.get_num_threads() if threads is None else threads
        if count < 1:
            raise ValueRangeError(message(f"threads is {threads}", "1 or more"))
        plan = self.plan(tuple(images.shape), count)
        y = torch.empty(plan.shape)
        shift = None if bias is None else self._checked(bias, "bias", self.shape[:1])
        added = None if residual is None else self._checked(residual, "residual", plan.shape)
        addresses = [0 if each is None else each.data_ptr() for each in (images, y, shift, added)]
        if y.numel():
            self._done(self._filled(tuple(addresses), plan, values, code, count))  # type: ignore[arg-type]
        return y if x.dtype == torch.float32 else y.to(x.dtype)

    def fast_path(
        self, values: Tensor, bias: Tensor | None = None, activation: str | None = None
    ) -> Callable[..., Tensor | None] | None:
        """Return a call with these values, this bias and this activation, which takes x and a residual.

        It returns None for tensors that are not contiguous float32 on the CPU.
        """
        if bias is not None and not (is_float(bias) and bias.shape == self.shape[:1]):
            return None
        code, shift = activation_code(activation), 0 if bias is None else bias.data_ptr()

        def call(x: Tensor, residual: Tensor | None = None, _alive: tuple[Any, ...] = (values, bias)) -> Tensor | None:
            if not is_float(x) or (residual is not None and not is_float(residual)):
                return None
            threads = torch.get_num_threads()
            plan = self.plan(tuple(x.shape), threads)
            if residual is not None and tuple(residual.shape) != plan.shape:
                return None
            y = torch.empty(plan.shape)
            ends = (x.data_ptr(), y.data_ptr(), shift, 0 if residual is None else residual.data_ptr())
            if y.numel():
                self._done(self._filled(ends, plan, values, code, threads))
            return y

        return call

    def product(
        self, values: Tensor, bias: Tensor | None = None, activation: str | None = None
    ) -> Callable[[tuple[int, ...], int], ImageProduct | None] | None:
        """Return this layer as a step of a chain, as a function of the images' shape and of threads.

        None where a bias would have to be converted; the function returns None for shapes that do not fit.
        """
        if bias is not None and not (is_float(bias) and bias.shape == self.shape[:1]):
            return None
        code, shift = activation_code(activation), 0 if bias is None else bias.data_ptr()

        def made(shape: tuple[int, ...], threads: int) -> ImageProduct | None:
            if len(shape) != self._dims + 2 or shape[1] != self.channels or 0 in shape:
                return None
            plan = self.plan(shape, threads)
            call = self._filled((0, 0, shift, 0), plan, values, code, threads)
            step = Step(self.kind, call, alive=(plan, values, bias))
            activated = None
            if activation is None:

                def activated(name: str) -> ImageProduct | None:
                    again = self.product(values, bias, name)
                    return None if again is None else again(shape, threads)

            return ImageProduct(step, plan.shape, handing=self._handing(step), activated=activated)

        return made

    def _handing(self, step: Step) -> Callable[[bool, tuple[Any, ...] | None, bool], Step] | None:
        """Return how the result of a step is handed on in bytes; None where it is not."""
        del step
        return None

    def plan(self, shape: tuple[int, ...], threads: int) -> ImagesPlan:
        """Return what calls for contiguous images of this shape share."""
        key = (*shape, threads)
        found = self._plans.get(key)
        if found is None:
            if len(shape) != self._dims + 2 or shape[1] != self.channels:
                wanted = (*("any", str(self.channels)), *["any"] * self._dims)
                raise ShapeError(message(f"x of shape {shape}", f"({', '.join(wanted)})"))
            found = self._planned(shape, threads)
            # A new dict, because another thread may be reading this one.
            self._plans = {**dict(list(self._plans.items())[1 - _KEPT :]), key: found}
        return found

    def _size(self, shape: tuple[int, ...]) -> tuple[int, int]:
        return (1, shape[2]) if self._dims == 1 else (shape[2], shape[3])

    def _done(self, call: bytes) -> None:
        code = self._run(call)
        if code:
            raise_for(code)

    def _checked(self, tensor: Tensor, name: str, shape: tuple[int, ...] | None) -> Tensor:
        """Return a tensor as contiguous float32, without a copy where that can be."""
        if shape is not None and tuple(tensor.shape) != tuple(shape):
            raise ShapeError(message(f"{name} of shape {tuple(tensor.shape)}", f"{tuple(shape)}"))
        if not tensor.is_cpu or tensor.dtype not in DTYPES:
            given = f"{name} of {tensor.dtype} on {tensor.device}"
            raise ValueRangeError(message(given, f"{', '.join(map(str, DTYPES))} on cpu"))
        return tensor.detach().resolve_neg().to(torch.float32).contiguous()

    def __getstate__(self) -> dict[str, Any]:
        # Addresses and the open library belong to this object in this process; a copy makes its own.
        kept = {name: value for name, value in vars(self).items() if name not in ("_plans", "library")}
        return kept | {"isa": self.library.isa}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.library = load(state.pop("isa"))
        vars(self).update(state, _plans={})


class DenseConv(PackedImages):
    """A convolution as products of a packed weight with the tokens of an image.

    Parameters
    ----------
    shape, geometry, isa
        As above.
    fewer
        Whether layers of 3x3 taps may be computed with fewer products; see :mod:`.cpu_winograd`.

    Examples
    --------
    >>> conv = DenseConv((4, 2, 3, 3), ConvGeometry.make(2, padding=1))
    >>> conv(torch.ones(1, 2, 5, 5), conv.pack(torch.ones(4, 2, 3, 3)))[0, 0, 0]
    tensor([ 8., 12., 12., 12.,  8.])
    """

    kind = StepKind.DENSE_CONV

    def __init__(
        self, shape: tuple[int, ...], geometry: ConvGeometry, isa: str | None = None, *, fewer: bool = True
    ) -> None:
        super().__init__(shape, geometry, isa)
        self._block, self._vectors = {"avx512": (8, 3), "avx2": (4, 3)}.get(self.library.isa, (4, 2))
        self._columns = shape[1] * self._kernel[0] * self._kernel[1]
        self._chunk = self._chunk_of(self._columns)
        self._fewer = (
            Winograd(self._block, self._vectors * self.library.lanes, self._chunk_of(shape[1]))
            if fewer and takes_winograd(shape, geometry)
            else None
        )

    def _chunk_of(self, columns: int) -> int:
        """Return how many columns are multiplied together: all, or equal parts whose values stay in the near cache."""
        most = _CHUNK_BYTES // (4 * self._vectors * self.library.lanes)
        return columns if columns <= most + most // 2 else -(-columns // -(-columns // most))

    def pack(self, weight: Tensor) -> Tensor:
        """Return the values of a weight: by group, chunk of columns, and block of rows."""
        if tuple(weight.shape) != self.shape:
            raise ShapeError(message(f"a weight of shape {tuple(weight.shape)}", f"{self.shape}"))
        real = weight.detach().to("cpu", torch.float32)
        found = [packed_blocks(real.reshape(self.geometry.groups, -1, self._columns), self._block, self._chunk)]
        found += [self._fewer.pack(real)] if self._fewer is not None else []
        return torch.cat([*found, torch.zeros(_PADDING)])

    def _values_of(self, values: Tensor) -> tuple[int, int]:
        """Return the addresses of packed values, and of those for fewer products."""
        groups = self.geometry.groups
        rows = -(-(self.shape[0] // groups) // self._block) * self._block
        direct = groups * rows * self._columns
        more = values.numel() > direct + _PADDING
        return values.data_ptr(), values.data_ptr() + 4 * direct if more else 0

    def _planned(self, shape: tuple[int, ...], threads: int) -> ImagesPlan:
        del threads  # which cut up what is to be done by themselves
        size, groups, each = self._size(shape), self.geometry.groups, self.shape[1]
        geometry = ConvGeometry(self._stride, self._padding, self._dilation)
        out_size = geometry.output_size(size, self._kernel)
        plain = self._kernel == self._stride == (1, 1) and not any(map(sum, self._padding))
        work = (1, size[0] * size[1]) if plain else size
        image, tiles, together = self._image(geometry, work, each)
        taps, places = torch.tensor(image.tap_slots), torch.tensor(image.tap_offsets)
        start = taps * (each * image.plane) + places
        offsets = (4 * (torch.arange(each)[:, None] * image.plane + start[None])).reshape(-1)
        if int(offsets[-1]) >= 2**31 or int(offsets.max()) >= 2**31:
            given = f"images of {size} with {self.channels} channels"
            raise ShapeError(message(given, "copies of 2 GiB at most", "use smaller images"))
        arrays = (
            torch.tensor(image.slot_rows, dtype=torch.int32),
            torch.tensor(image.slot_columns, dtype=torch.int32),
            torch.ones(len(image.slot_rows) * each, dtype=torch.uint8),
            offsets.to(torch.int32),
        )
        pixels = size[0] * size[1]
        strides = (each * pixels, pixels, work[1], 1)
        numbers = (each, *work, *image.out_size, *self._stride, len(image.slot_rows), image.row_width)
        numbers += (image.band_tokens, image.reach, image.plane)
        addresses, tile = tuple(a.data_ptr() for a in arrays), (tiles, together, self._block, self._vectors)
        fewer, alive = (0, ()) if self._fewer is None else self._fewer.planned(self._padding, (shape[0], each, *size))
        rest = (addresses, (shape[0] * groups, *strides, *numbers, int(image.direct)), tile, fewer)
        return ImagesPlan((shape[0], self.shape[0], *out_size[2 - self._dims :]), rest, (*arrays, *alive))

    def _image(self, geometry: ConvGeometry, size: tuple[int, int], channels: int) -> tuple[ImagePlan, int, int]:
        """Return the layout of the copy, the tiles that tokens are cut into, and how many caches like to hold at once.

        Where tokens are no whole vectors a tile takes one more than its vectors: it is computed apart.
        """
        lanes, full = self.library.lanes, self._vectors * self.library.lanes
        if self._kernel != (1, 1) and channels <= _FEW_CHANNELS and self._chunk == self._columns:
            plan = self._in_place(geometry, size, channels)
            if plan.row_width != plan.out_size[1] >= lanes:
                return plan, 1, 1
        image = "flat" if self._kernel == (1, 1) else "columns"  # which may be read where it is
        plan = plan_image(geometry, self._kernel, size, image=image, channels=channels, contiguous=True)
        tokens, copies = plan.out_size[0] * plan.out_size[1], len(plan.slot_rows) * channels
        most = full + (tokens % lanes > 0)
        tiles = -(-tokens // most)
        room = _COPY_FLOATS // copies - plan.reach
        if plan.direct:  # what is stored in parts is read again by the next one
            room = tokens if self._chunk == self._columns else max(_COPY_FLOATS // self.shape[0], _LEAST_TILES * full)
        together = max(min(room // most, tiles), 1)
        lines = -(-(together * most + plan.reach + 2 * lanes) // 16)
        plane = size[0] * size[1] if plan.direct else 16 * (lines + 1 - lines % 2)
        return replace(plan, band_tokens=together * most, plane=plane), tiles, together

    def _in_place(self, geometry: ConvGeometry, size: tuple[int, int], channels: int) -> ImagePlan:
        """Return the layout of a copy whose rows have gaps and whose taps are read where they are, in bands of rows."""
        plan = plan_image(geometry, self._kernel, size, channels=channels)
        more = -(-plan.reach // plan.row_width)  # rows behind a band that its taps read
        rows = max(_FEW_FLOATS // (len(plan.slot_rows) * channels * plan.row_width) - more, 0)
        # Vectors of so many rows are whole tiles, however many a row has.
        rows = min(max(rows // self._vectors, 1) * self._vectors, plan.out_size[0])
        lines = -(-((rows + more) * plan.row_width + self.library.lanes) // 16)
        return replace(plan, band_tokens=rows * plan.row_width, plane=16 * (lines + 1 - lines % 2), direct=False)

    def _filled(
        self, ends: tuple[int, int, int, int], plan: ImagesPlan, values: Tensor, activation: int, threads: int
    ) -> bytes:
        (rows, columns, used, offsets), numbers, tile, fewer = plan.rest
        groups, (packed, transformed) = self.geometry.groups, self._values_of(values)
        sizes = (groups, self.shape[0] // groups, self._columns, self._chunk, *tile)
        fixed = (*ends, rows, columns, used, *numbers, activation, threads, packed, offsets, *sizes)
        return DENSE_CONV_CALL.pack(*fixed, fewer if transformed else 0, transformed)

    def _run(self, call: bytes) -> int:
        return int(self.library.handle.sparta_dense_conv(call))


class DepthwiseConv(PackedImages):
    """A convolution with one input channel for each group: planes that do not meet.

    Examples
    --------
    >>> conv = DepthwiseConv((2, 1, 3, 3), ConvGeometry.make(2, padding=1, groups=2))
    >>> conv(torch.ones(1, 2, 4, 4), conv.pack(torch.ones(2, 1, 3, 3)))[0, 0, 0]
    tensor([4., 6., 6., 4.])
    """

    kind = StepKind.DEPTHWISE

    def __init__(self, shape: tuple[int, ...], geometry: ConvGeometry, isa: str | None = None) -> None:
        if len(shape) < 3 or shape[1] != 1:
            raise ShapeError(message(f"a depthwise weight of shape {shape}", "(N, 1, ...)"))
        super().__init__(shape, geometry, isa)

    def pack(self, weight: Tensor) -> Tensor:
        """Return the values of a weight, which are those of its channels one after the other."""
        if tuple(weight.shape) != self.shape:
            raise ShapeError(message(f"a weight of shape {tuple(weight.shape)}", f"{self.shape}"))
        return weight.detach().to("cpu", torch.float32).reshape(-1).clone()

    def _planned(self, shape: tuple[int, ...], threads: int) -> ImagesPlan:
        del threads
        size, outputs = self._size(shape), self.shape[0]
        out_size = ConvGeometry(self._stride, self._padding, self._dilation).output_size(size, self._kernel)
        before = (self._padding[0][0], self._padding[1][0])
        plain = self._kernel == self._stride == (1, 1) and not any(map(sum, self._padding))
        flat = (1, size[0] * size[1])
        sizes = (*flat, *flat) if plain else (*size, *out_size)
        numbers = (shape[0] * outputs, outputs, outputs // self.geometry.groups, *sizes)
        rest = (*numbers, *self._kernel, *self._stride, *before, *self._dilation)
        return ImagesPlan((shape[0], outputs, *out_size[2 - self._dims :]), rest)

    def _filled(
        self, ends: tuple[int, int, int, int], plan: ImagesPlan, values: Tensor, activation: int, threads: int
    ) -> bytes:
        return DEPTHWISE_CALL.pack(*ends, values.data_ptr(), *plan.rest, activation, threads, *_REAL_RESULT)

    def _handing(self, step: Step) -> Callable[[bool, tuple[Any, ...] | None, bool], Step] | None:
        fixed = DEPTHWISE_CALL.unpack(step.call)[: -len(_REAL_RESULT)]

        def handed(places: bool, to: tuple[Any, ...] | None, bytes_added: bool) -> Step:  # noqa: FBT001 - the item's
            assert not places  # noqa: S101 - it rounds neither its images nor what it adds
            assert not bytes_added  # noqa: S101
            if to is None:
                return step
            inverse, unsigned, zero = to
            return replace(step, call=DEPTHWISE_CALL.pack(*fixed, 0, inverse, 1, unsigned, zero))

        return handed

    def _run(self, call: bytes) -> int:
        return int(self.library.handle.sparta_depthwise(call))


def dense_images(shape: tuple[int, ...], geometry: ConvGeometry, isa: str | None = None) -> PackedImages:
    """Return the kernel for a dense weight of this shape.

    >>> type(dense_images((8, 1, 3, 3), ConvGeometry.make(2, groups=8))).__name__
    'DepthwiseConv'
    """
    if len(shape) > 1 and shape[1] == 1 and geometry.groups > 1:
        return DepthwiseConv(shape, geometry, isa)
    return DenseConv(shape, geometry, isa)
