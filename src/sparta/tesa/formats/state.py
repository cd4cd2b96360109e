"""Reading a packed matrix back from a file: every number is checked before it is used as an index.

:meth:`~.base.Packed.state` gives named tensors and JSON metadata; :class:`StateReader` hands them out again one by one
and refuses what does not fit. A kernel trusts its index blindly, so an edited or truncated file must fail here, with a
sentence that says what is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias, TypeGuard

import torch
from torch import Tensor

from sparta.errors import FileFormatError, message

__all__ = ["JSON", "STATE_VERSION", "StateReader"]

JSON: TypeAlias = dict[str, "JSON"] | list["JSON"] | str | int | float | bool | None

STATE_VERSION = 1


class StateReader:
    """Hands out the tensors and metadata of one packed matrix, checked.

    Parameters
    ----------
    tensors, meta
        As :meth:`~.base.Packed.state` returned them.

    >>> reader = StateReader({"values": torch.zeros(2)}, {"format": "bitmap", "version": 1, "cols": 3})
    >>> reader.format_name, reader.integer("cols", minimum=0)
    ('bitmap', 3)
    """

    def __init__(self, tensors: Mapping[str, Tensor], meta: Mapping[str, JSON]) -> None:
        self._tensors = dict(tensors)
        self._meta = dict(meta)
        name = self._meta.pop("format", None)
        self.format_name = name if isinstance(name, str) else ""
        self.require(holds=isinstance(name, str), problem=f"the metadata names no format (it is {name!r})")
        version = self.integer("version", minimum=1)
        self.require(
            holds=version <= STATE_VERSION,
            problem=f"version {version} is newer than version {STATE_VERSION}, the newest known here",
        )

    def damaged(self, problem: str) -> FileFormatError:
        """Return the error that says what is wrong with this matrix."""
        return FileFormatError(
            message(
                f"the stored {self.format_name or 'packed'} matrix cannot be read: {problem}",
                fix="save it again from the original, or fetch an unedited copy",
            )
        )

    def require(self, *, holds: bool, problem: str) -> None:
        """Raise FileFormatError with `problem` unless it `holds`."""
        if not holds:
            raise self.damaged(problem)

    def integer(self, key: str, *, minimum: int) -> int:
        """Return metadata `key`, an integer of at least `minimum`."""
        value = self._meta.pop(key, None)
        if not _is_integer(value) or value < minimum:
            raise self.damaged(f"{key} is {value!r}, not an integer of at least {minimum}")
        return value

    def pair(self, key: str, *, minimum: int) -> tuple[int, int]:
        """Return metadata `key`, a list of two integers of at least `minimum`."""
        value = self._meta.pop(key, None)
        sizes = [size for size in value if _is_integer(size)] if isinstance(value, list) else []
        if not isinstance(value, list) or len(value) != 2 or len(sizes) != 2 or min(sizes) < minimum:
            raise self.damaged(f"{key} is {value!r}, not a list of two integers of at least {minimum}")
        return sizes[0], sizes[1]

    def index(self, name: str, dtype: torch.dtype, shape: tuple[int | None, ...]) -> Tensor:
        """Return tensor `name`, of this dtype and shape (None: any size)."""
        tensor = self._take(name)
        fits = tensor.ndim == len(shape) and all(
            want is None or have == want for have, want in zip(tensor.shape, shape, strict=True)
        )
        wanted = "(" + ", ".join("any" if s is None else str(s) for s in shape) + ")"
        self.require(holds=fits, problem=f"{name} has shape {tuple(tensor.shape)}, not {wanted}")
        self.require(holds=tensor.dtype == dtype, problem=f"{name} has dtype {tensor.dtype}, not {dtype}")
        return tensor

    def values(self, trailing: tuple[int, ...]) -> Tensor:
        """Return the values, whose last dimensions must be `trailing`; dimensions before them are batch."""
        tensor = self._take("values")
        ends = tuple(tensor.shape[tensor.ndim - len(trailing) :]) if tensor.ndim >= len(trailing) else None
        self.require(
            holds=ends == trailing,
            problem=f"values have shape {tuple(tensor.shape)}, which does not end in {trailing}",
        )
        return tensor

    def pointers(self, name: str, segments: int, entries: int, dtype: torch.dtype) -> Tensor:
        """Return tensor `name` of shape (segments + 1,): from 0, never falling, to `entries`."""
        tensor = self.index(name, dtype, (segments + 1,))
        first, last = int(tensor[0]), int(tensor[-1])
        self.require(holds=first == 0, problem=f"{name} starts at {first}, not at 0")
        self.require(holds=last == entries, problem=f"{name} ends at {last}, not at {entries}")
        self.require(holds=bool((tensor.diff() >= 0).all()), problem=f"{name} is not in ascending order")
        return tensor

    def finish(self) -> None:
        """Raise if the file holds anything that was not read: nothing is silently ignored."""
        extra = sorted([*self._tensors, *self._meta])
        self.require(holds=not extra, problem=f"unexpected entries {', '.join(extra)}")

    def _take(self, name: str) -> Tensor:
        """Return tensor `name` and mark it read."""
        if name not in self._tensors:
            raise self.damaged(f"tensor {name!r} is missing")
        return self._tensors.pop(name)


def _is_integer(value: JSON) -> TypeGuard[int]:
    """Whether a JSON value is an integer; to Python `true` is one too, but it is not a size."""
    return isinstance(value, int) and not isinstance(value, bool)
