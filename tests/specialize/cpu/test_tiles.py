"""Tiles as they stand in files: read back as written, refused with what is allowed, whatever was written."""

import pytest

from sparta.errors import SpartaError, ValueRangeError
from sparta.specialize.cpu.bf16 import Bf16Tile
from sparta.specialize.cpu.short import ShortTile
from sparta.specialize.cpu.tile import Tile

TILES = [(Tile, "panel:4:4:1:0:0"), (ShortTile, "bitmap:1:0"), (Bf16Tile, "pairs:4:64")]


@pytest.mark.parametrize(("kind", "text"), TILES)
def test_what_was_written_is_read(kind, text):
    assert str(kind.parse(text)) == text


@pytest.mark.parametrize(("kind", "text"), TILES)
@pytest.mark.parametrize("number", ["", "-1", "four", "²", "٣", "9" * 5000])
def test_what_is_no_number_is_refused(kind, text, number):
    form, _, *rest = text.split(":")
    with pytest.raises(ValueRangeError, match="the tile"):
        kind.parse(":".join([form, number, *rest]))
    with pytest.raises(SpartaError):
        kind.parse(form)
