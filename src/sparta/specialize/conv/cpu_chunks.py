"""Images of one tap that are copied chunk by chunk of their channels, just before they are read: ``'chunks'``.

A copy of a whole image, its weight and the image itself may be more than the second level of caches holds. Here a tile
of pixels is copied for some channels at a time, over those before, and all rows of the weight multiply what lies in the
nearest cache; sums wait on lines of their own. Offsets are those of the layout ``'taps'``, whose bands are tiles too.
"""

from __future__ import annotations

__all__ = ["CHUNKS"]

CHUNKS = "chunks"
