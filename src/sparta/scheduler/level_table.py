"""The level table: how sparse each layer is at each level, decided once, before training, and kept in files.

It is what the analysis of a level scheduler makes: JSON to read back, CSV for people, a plot to look at. The table is
plain data that can be edited and used again, and it is checked against the model when it is.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from sparta.errors import FileFormatError, message
from sparta.files import read_json_file, write_atomic
from sparta.tables import table

__all__ = ["LevelTable"]

_KIND, _VERSION = "sparta level table", 1
_COLOURS = ("#1b6ca8", "#c8553d", "#3a7d44", "#8e5ea2", "#b8860b", "#4f6d7a", "#d1495b", "#00798c")

_Rates = tuple[Annotated[float, Field(strict=True, ge=0, le=1)], ...]
_Count = Annotated[int, Field(strict=True, ge=0)]


@dataclass(frozen=True)
class LevelTable:
    """Sparsities of layers at levels.

    Parameters
    ----------
    levels
        Sparsity of the network at each level, as asked for, in [0, 1).
    achieved
        What the layers' sparsities come to.
    layers
        For each layer its sparsity at each level.
    sizes
        For each layer its number of weights.

    Examples
    --------
    >>> print(LevelTable((0.5,), (0.5,), {"fc.weight": (0.5,)}, {"fc.weight": 8}))
    layer      weights  0.5
    ---------  -------  ---
    fc.weight        8  0.5
    network          8  0.5
    """

    levels: _Rates
    achieved: _Rates
    layers: Mapping[str, _Rates]
    sizes: Mapping[str, _Count]

    def to_dict(self) -> dict[str, Any]:
        """Return the table as JSON values."""
        return {
            "kind": _KIND,
            "version": _VERSION,
            "levels": list(self.levels),
            "achieved": list(self.achieved),
            "layers": {name: list(rates) for name, rates in self.layers.items()},
            "sizes": dict(self.sizes),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LevelTable:
        """Return the table that :meth:`to_dict` wrote; a :class:`FileFormatError` says what does not fit."""
        if not isinstance(data, Mapping) or data.get("kind") != _KIND or data.get("version") != _VERSION:
            kind = data.get("kind") if isinstance(data, Mapping) else data
            raise FileFormatError(message(f"a {kind!r}", f"a {_KIND} of version {_VERSION}"))
        fields = {key: value for key, value in data.items() if key not in ("kind", "version")}
        try:
            made = TypeAdapter(cls).validate_python(fields)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(str(part) for part in first["loc"])
            given = f"a damaged level table ({place}: {first['msg']})"
            raise FileFormatError(message(given, fix="analyse again")) from error
        lengths = {len(made.levels), len(made.achieved), *(len(rates) for rates in made.layers.values())}
        if len(lengths) > 1 or made.layers.keys() != made.sizes.keys():
            raise FileFormatError(message("a level table whose parts differ in length", fix="analyse again"))
        return made

    def fits(self, levels: Sequence[float], sizes: Mapping[str, int]) -> bool:
        """Return whether the table is one of these levels and these layers."""
        return self.levels == tuple(levels) and dict(self.sizes) == dict(sizes)

    def save(self, folder: Path) -> None:
        """Write ``level_table.json``, ``level_table.csv`` and ``level_table.svg`` into `folder`."""
        write_atomic(folder / "level_table.json", (json.dumps(self.to_dict(), indent=1) + "\n").encode())
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["layer", "weights", *(f"{level:g}" for level in self.levels)])
        writer.writerows([name, self.sizes[name], *rates] for name, rates in self.layers.items())
        writer.writerow(["network", sum(self.sizes.values()), *self.achieved])
        write_atomic(folder / "level_table.csv", text.getvalue().encode())
        write_atomic(folder / "level_table.svg", self._plot().encode())

    @classmethod
    def load(cls, folder: Path) -> LevelTable:
        """Read ``level_table.json`` of `folder`."""
        file = folder / "level_table.json"
        try:
            return cls.from_dict(read_json_file(file))
        except (OSError, FileFormatError) as error:
            raise FileFormatError(message(f"cannot read {file}: {error}", fix="analyse again")) from error

    def __str__(self) -> str:
        rows: list[list[object]] = [[name, self.sizes[name], *rates] for name, rates in self.layers.items()]
        rows.append(["network", sum(self.sizes.values()), *self.achieved])
        return table(["layer", "weights", *(f"{level:g}" for level in self.levels)], rows)

    def _plot(self) -> str:
        """Return the plot: layers from left to right, one line per level."""
        width, height, left, top = 80 + 24 * max(2, len(self.layers)), 300, 50, 20
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width + 120}" height="{height + 60}">',
            f'<text x="{left}" y="14">sparsity of each layer, first to last, at each level</text>',
        ]
        for tick in range(0, 101, 25):
            y = top + height * (1 - tick / 100)
            lines.append(f'<line x1="{left}" x2="{width}" y1="{y}" y2="{y}" stroke="#ddd"/>')
            lines.append(f'<text x="8" y="{y + 4}">{tick} %</text>')
        for place, level in enumerate(self.levels):
            colour = _COLOURS[place % len(_COLOURS)]
            points = " ".join(
                f"{left + 24 * (at + 0.5):.1f},{top + height * (1 - rates[place]):.1f}"
                for at, rates in enumerate(self.layers.values())
            )
            lines.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{points}"/>')
            lines.append(f'<text x="{width + 8}" y="{top + 14 * place + 12}" fill="{colour}">{level:.0%}</text>')
        return "\n".join([*lines, "</svg>", ""])
