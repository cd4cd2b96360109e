"""The tile: how a packed weight is laid out and how its kernel walks over it.

A :class:`Tile` is all that is tuned in a CPU kernel. A tile changes the speed, never the result (beyond the order in
which sums are rounded).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from sparta.errors import NameNotFoundError, ValueRangeError, did_you_mean, message

__all__ = ["FORMS", "Tile", "written_tile"]

# Block heights of each form. ``panel``, ``gathered`` and ``runs`` are for many tokens, the others for one or a few.
FORMS = {
    "panel": (1, 4, 8),
    "gathered": (16,),
    "runs": (32,),
    "columns": (4, 8, 16),
    "permuted": (16,),
    "bitmap": (1,),
    "rows": (1,),
}
AVX512_FORMS = ("permuted", "bitmap")
_VECTORS = (1, 2, 3, 4)
_QUAD_VECTORS = (1, 2, 3, 4, 5, 6, 7)
_INTERLEAVES = (1, 2, 4)
# Lists of offsets are padded by this many entries, so that prefetching may run ahead.
MOST_AHEAD = 16
_MOST_DIGITS = 9


@dataclass(frozen=True)
class Tile:
    """How a weight is packed and multiplied.

    Parameters
    ----------
    form
        ``'panel'`` vectorises over tokens, ``'gathered'`` multiplies tiles of 16 rows (int8 only), and ``'runs'``
        vectorises over the rows of a block (convolutions of int8 only); ``'columns'``,
        ``'permuted'``, ``'bitmap'`` (these two only with AVX-512) and ``'rows'`` read the weights as one stream, for
        one token or a few.
    block
        Output channels that share one list of input channels. An input channel is stored for a block if any of its
        weights is live.
    mv
        Vectors of tokens that are computed at once (panel, gathered); up to 7 for four rows that share what they load,
        else 4, or 3 for blocks of 8.
    interleave
        Rows that are computed at once, for ``block=1`` (panel); four of them share what they load.
    k_chunk
        Input channels that are worked on before the next ones, so that they stay in the cache; 0 for all (panel).
    prefetch
        How far ahead to prefetch: entries, 0 to 16, for blocks of 4 and 8 (panel); bytes (the other forms).

    Examples
    --------
    >>> Tile(block=4, mv=4).to_dict()
    {'form': 'panel', 'block': 4, 'mv': 4, 'interleave': 1, 'k_chunk': 0, 'prefetch': 0}
    """

    form: str = "panel"
    block: int = 1
    mv: int = 1
    interleave: int = 1
    k_chunk: int = 0
    prefetch: int = 0

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise NameNotFoundError(did_you_mean(str(self.form), FORMS, "form"))
        self._need("block", self.block, FORMS[self.form])
        panel = self.form == "panel"
        many = panel or self.form == "gathered"
        self._need("interleave", self.interleave, _INTERLEAVES if panel and self.block == 1 else (1,))
        vectors = _QUAD_VECTORS if self.interleave == _INTERLEAVES[-1] else _VECTORS
        self._need("mv", self.mv, _VECTORS[:3] if self.block == 8 else vectors if many else (1,))
        if self.k_chunk < 0 or (self.k_chunk and not panel):
            raise ValueRangeError(message(f"k_chunk is {self.k_chunk}", "0 or more for panels, else 0"))
        most = (0 if self.block in (1, 16) else MOST_AHEAD) if many else 0 if self.form == "runs" else 1 << 20
        if not 0 <= self.prefetch <= most:
            given = f"prefetch is {self.prefetch}"
            raise ValueRangeError(message(given, f"0 to {most} for blocks of {self.block} in the form {self.form}"))

    def _need(self, name: str, value: int, allowed: tuple[int, ...]) -> None:
        if value not in allowed:
            given = f"{name} is {value} for blocks of {self.block} in the form {self.form}"
            raise ValueRangeError(message(given, ", ".join(map(str, allowed))))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return asdict(self)

    def __str__(self) -> str:
        return ":".join(map(str, asdict(self).values()))

    @classmethod
    def parse(cls, text: str) -> Tile:
        """Return the tile that ``str(tile)`` wrote.

        >>> Tile.parse("panel:4:4:1:0:0") == Tile(block=4, mv=4)
        True
        """
        form, numbers = written_tile(text, "form:block:mv:interleave:k_chunk:prefetch")
        return cls(form, *numbers)


def written_tile(text: str, fields: str) -> tuple[str, list[int]]:
    """Return the form and the numbers of a tile as it stands in a file.

    Parameters
    ----------
    text
        What was written: a form and numbers, with colons between them.
    fields
        The names of the same, for whom it does not fit.

    Examples
    --------
    >>> written_tile("panel:4:0", "form:block:prefetch")
    ('panel', [4, 0])
    """
    form, *numbers = str(text).split(":")
    plain = all(number.isascii() and number.isdigit() and len(number) <= _MOST_DIGITS for number in numbers)
    if not plain or len(numbers) != fields.count(":"):
        raise ValueRangeError(message(f"the tile {str(text)[:80]!r}", fields))
    return form, [int(number) for number in numbers]
