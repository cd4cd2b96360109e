"""A packed matrix: live values and an index, in place of a dense tensor.

Every storage format derives from :class:`Packed` and registers its name, so that files, kernels and :func:`pack` find
it. The index describes one (rows, cols) matrix and the values may have batch dimensions in front, ``(*batch, ...)``:
many matrices with the same zeros share one index.
"""

from __future__ import annotations

import dataclasses
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Self, TypeVar

import torch
from torch import Tensor

from sparta.errors import NameNotFoundError, ShapeError, ValueRangeError, did_you_mean, message
from sparta.tesa.formats.block_index import BlockIndex
from sparta.tesa.formats.live import MaskLike
from sparta.tesa.formats.state import JSON, STATE_VERSION, StateReader

__all__ = ["Packed", "format_named", "known_formats", "pack", "register_format", "unpack"]


@dataclass(frozen=True, eq=False, repr=False)
class Packed(ABC):
    """A matrix stored as its live values and their index. Immutable; leave the tensors it holds alone.

    Attributes
    ----------
    values
        Live values, batch dimensions first; the rest of the shape is the format's.
    """

    format_name: ClassVar[str]
    """The name this format has in files and for :func:`pack`."""
    pack: ClassVar[Callable[..., Packed]]
    """Make a packed matrix from a dense one: ``pack(dense, tesa, **options of the format)``."""

    values: Tensor

    def __post_init__(self) -> None:
        want = self.value_shape
        have = tuple(self.values.shape)
        if have[max(0, len(have) - len(want)) :] != want:
            raise ShapeError(
                message(
                    f"values have shape {have}",
                    f"(*batch, {', '.join(map(str, want))}), as the {self.format_name} index says",
                    "pack the dense tensor again if its zeros have moved",
                )
            )

    @property
    @abstractmethod
    def matrix_shape(self) -> tuple[int, int]:
        """(rows, cols) of the matrix that is packed."""

    @property
    @abstractmethod
    def value_shape(self) -> tuple[int, ...]:
        """Shape of the values of one matrix, without batch dimensions."""

    @abstractmethod
    def index_tensors(self) -> dict[str, Tensor]:
        """Return the tensors that say where the values belong, by the names they have in files."""

    @abstractmethod
    def index_meta(self) -> dict[str, JSON]:
        """Return what else is needed to read the index back, as JSON."""

    @classmethod
    @abstractmethod
    def read_state(cls, reader: StateReader) -> Self:
        """Make a packed matrix from a checked file; :meth:`from_state` is the way in for callers."""

    @abstractmethod
    def unpack(self) -> Tensor:
        """Return the dense tensor, shape :attr:`shape`: the stored values, zero elsewhere."""

    @abstractmethod
    def stored_mask(self) -> Tensor:
        """Return which elements have a place in the values: bool, shape :attr:`matrix_shape`."""

    @abstractmethod
    def sum(self, axis: int) -> Tensor:
        """Return the sum of each row (axis -1) or column (axis -2) of the matrix, without unpacking it.

        Sums of floats narrower than 32 bits are float32 and sums of integers int64, carried in 64 bits across
        blocks.
        """

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Leading dimensions: how many matrices share this index."""
        return tuple(self.values.shape[: self.values.ndim - len(self.value_shape)])

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dense tensor this stands for: ``(*batch, rows, cols)``."""
        return (*self.batch_shape, *self.matrix_shape)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the values."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """Where the values and the index are."""
        return self.values.device

    @property
    def nbytes(self) -> int:
        """Bytes of the values and of the index tensors of this format, as :meth:`state` gives them."""
        return sum(tensor.nbytes for tensor in (self.values, *self.index_tensors().values()))

    def with_values(self, values: Tensor) -> Self:
        """Return the same index over other values, shape ``(*any batch, *value_shape)``, on the same device.

        Values of dead elements that share a block with live ones are taken as they come: keep them at 0.
        """
        if values.device != self.device:
            raise ValueRangeError(
                message(f"values are on {values.device}", f"{self.device}, where the index is", "move one of them")
            )
        return dataclasses.replace(self, values=values)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """Return this matrix on `device`, its values as `dtype`; None leaves either as it is."""
        target = self.device if device is None else torch.device(device)
        changes: dict[str, Tensor | BlockIndex] = {
            "values": self.values.to(device=target, dtype=self.dtype if dtype is None else dtype)
        }
        for field in dataclasses.fields(self):
            part = getattr(self, field.name)
            if field.name != "values" and isinstance(part, (Tensor, BlockIndex)):
                changes[field.name] = part.to(target)
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]  # names come from the fields

    def state(self) -> tuple[dict[str, Tensor], dict[str, JSON]]:
        """Return what a file needs: named contiguous tensors, and metadata with the format's name."""
        tensors = {"values": self.values, **self.index_tensors()}
        meta: dict[str, JSON] = {"format": self.format_name, "version": STATE_VERSION, **self.index_meta()}
        return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}, meta

    @classmethod
    def from_state(cls, tensors: Mapping[str, Tensor], meta: Mapping[str, JSON]) -> Self:
        """Undo :meth:`state`. ``Packed.from_state`` takes any format, a subclass only its own.

        Raises
        ------
        FileFormatError
            If anything is missing, of the wrong shape or dtype, out of range, out of order, or unknown.
        """
        reader = StateReader(tensors, meta)
        target = _FORMATS.get(reader.format_name)
        if target is None:
            raise reader.damaged(did_you_mean(reader.format_name, _FORMATS, "format").removesuffix("."))
        if not issubclass(target, cls):
            raise reader.damaged(f"a {cls.__name__} matrix was asked for")
        devices = sorted({str(tensor.device) for tensor in tensors.values()})
        reader.require(holds=len(devices) <= 1, problem=f"its tensors are on several devices {devices}")
        packed = target.read_state(reader)
        reader.finish()
        return packed

    def __repr__(self) -> str:
        details = ", ".join(f"{key}={value}" for key, value in self.index_meta().items() if key != "shape")
        return (
            f"{type(self).__name__}(shape={self.shape}, {details}{', ' if details else ''}"
            f"dtype={self.dtype}, device={self.device}, nbytes={self.nbytes})"
        )


_FORMATS: dict[str, type[Packed]] = {}

P = TypeVar("P", bound=Packed)


def register_format(cls: type[P]) -> type[P]:
    """Class decorator: make a format known by its ``format_name``."""
    if cls.format_name in _FORMATS:
        raise ValueRangeError(
            message(f"format {cls.format_name!r} is registered already", fix="choose another format_name")
        )
    _FORMATS[cls.format_name] = cls
    return cls


def known_formats() -> tuple[str, ...]:
    """Return the names of all formats, sorted.

    >>> "bcsr" in known_formats()
    True
    """
    return tuple(sorted(_FORMATS))


def format_named(name: str) -> type[Packed]:
    """Return the format class of this name.

    >>> format_named("bitmap").__name__
    'Bitmap'
    """
    if name not in _FORMATS:
        raise NameNotFoundError(did_you_mean(name, _FORMATS, "format"))
    return _FORMATS[name]


def pack(dense: Tensor, tesa: MaskLike, format: str, **options: object) -> Packed:
    """Pack a dense tensor into the format of this name.

    Parameters
    ----------
    dense
        Shape ``(*batch, rows, cols)``; any dtype, strides and device.
    tesa
        TeSA or bool mask of shape (rows, cols). What is not live is stored as 0 or not at all.
    format
        One of :func:`known_formats`.
    options
        What the format needs: ``block=(h, w)`` for bcsr, bcsc and bcsrc; ``n=`` and ``m=`` for nm.

    >>> packed = pack(torch.tensor([[1.0, 2.0]]), torch.tensor([[True, False]]), format="bitmap")
    >>> unpack(packed)
    tensor([[1., 0.]])
    """
    packer = format_named(format).pack
    parameters = inspect.signature(packer).parameters
    takes = [name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY]
    for name in options:
        if name not in takes:
            raise NameNotFoundError(did_you_mean(name, takes, f"{format} option"))
    missing = [name for name in takes if name not in options and parameters[name].default is inspect.Parameter.empty]
    if missing:
        raise ValueRangeError(
            message(f"format {format!r} was given no {' and no '.join(missing)}", fix=f"pass {missing[0]}=...")
        )
    return packer(dense, tesa, **options)


def unpack(packed: Packed) -> Tensor:
    """Return the dense tensor of a packed matrix, see :meth:`Packed.unpack`.

    >>> unpack(pack(torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool), format="bitmap"))
    tensor([[1., 1.]])
    """
    return packed.unpack()
