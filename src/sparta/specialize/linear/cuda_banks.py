"""``cuda-banks``: unstructured weights for very few tokens, every lane with a bank of shared memory of its own.

The kernel is CUDA C++ (``native/banks.cu``), compiled at run time for one tile. As ``cuda-gather`` it reads half a byte
or one more than a live value for each and does nothing for those that are pruned; but lanes never wait for each other's
looks into shared memory, and an input is found in fewer instructions. On Hopper, pieces of the weight come into shared
memory by bulk copies, several of them ahead.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from sparta.specialize.cuda.device import AMPERE, HALF_FORMATS, bulk_copies, takes
from sparta.specialize.cuda.few_tokens import SHARED_BYTES, nvrtc_here
from sparta.specialize.cuda.text_tile import TextTile
from sparta.specialize.implement import Params, Support, TiledImplement
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.linear.cuda_banks_layout import BANKS, BanksLayout, run_of, segments_of
from sparta.specialize.linear.spec import LinearKernel
from sparta.specialize.linear.streamed import StreamedKernel, streamed_call, walking_pays, walking_width

__all__ = ["BanksKernel", "BanksTile", "CudaBanks", "banks_fits", "banks_tiles"]

_MOST_LIVE = {1: 0.55, 2: 0.55, 4: 0.55}  # density by tokens, up to which it was faster than dense on an H200
# By the least density: half bytes or bytes for places, and pieces on their way at a time, the best of H200 first.
_KINDS = ((0.14, ((1, 2), (1, 3))), (0.07, ((1, 4), (0, 3))), (0.0, ((0, 3), (0, 6))))
_PITCH, _WORD, _BARRIER = 33, 4, 8
_MOST_STRIPS = 256
_MULTIPROCESSORS = 132
_WARPS, _TASKS, _CTAS = range(8, 33, 4), range(1, 13), (1, 2, 3, 4)  # registers are given to four warps at once
_ALONE = (1,)  # with copies into shared memory, one block keeps enough bytes on their way
_COPIED_WARPS = (16,)
_COPIES = ((4, 2), (4, 3), (8, 2))  # depth, stages; the best of H200 first
_NIBBLES_PAY = 0.14  # density from which on most distances fit into half a byte
_FEWEST_WARPS, _MOST_WARPS = 16, 40  # of a multiprocessor
_SHAPES = 4


@dataclass(frozen=True)
class BanksTile(TextTile):
    """How one block of threads cuts its work; it changes the speed, and of the result only how sums are rounded.

    Parameters
    ----------
    tokens
        Rows of x that a block multiplies.
    warps
        Of a block.
    tasks
        Outputs of a block for each of its warps.
    depth
        Pieces that a lane has on their way at once.
    nibbles
        1 if inputs are given by distances of half a byte; 0 if by positions of a byte.
    ctas
        Blocks for which a multiprocessor has registers at the same time.
    stages
        Places in shared memory into which each warp has `depth` pieces copied at once; 0: pieces come into registers.

    Examples
    --------
    >>> BanksTile.parse(str(BanksTile(2, warps=14))).rows
    56
    """

    tokens: int = 1
    warps: int = 8
    tasks: int = 4
    depth: int = 4
    nibbles: int = 1
    ctas: int = 2
    stages: int = 0

    _choices: ClassVar[dict[str, tuple[int, ...]]] = {
        "tokens": tuple(_MOST_LIVE),
        "warps": tuple(range(1, 33)),
        "tasks": tuple(range(1, 33)),
        "depth": (1, 2, 3, 4, 6, 8),
        "nibbles": (0, 1),
        "ctas": (1, 2, 3, 4, 5, 6, 8),
        "stages": tuple(range(17)),
    }

    @property
    def rows(self) -> int:
        """Outputs of a block."""
        return self.warps * self.tasks

    def piece_bytes(self, *, narrow: bool = False) -> int:
        """Return the bytes of a piece of a warp; `narrow` if values take 8 bits."""
        return BANKS * (_WORD + (8 if self.nibbles else 4) * (1 if narrow else 2))

    def shared_bytes(self, inputs: int, *, narrow: bool = False) -> int:
        """Return the shared memory of a block: all of x, pieces, owners, what results need, and the sums of strips.

        Parameters
        ----------
        narrow
            Whether values take 8 bits.
        """
        planes, segments = -(-self.tokens // 2), segments_of(inputs)
        x = planes * segments * run_of(inputs) * BANKS * _WORD
        ring = self.warps * self.stages * (self.depth * self.piece_bytes(narrow=narrow) + _BARRIER)
        strips = self.rows * segments
        return x + ring + strips * BANKS + self.rows * 3 * _WORD + self.tokens * strips * _PITCH * _WORD


class BanksKernel(StreamedKernel):
    """See ``native/banks.cu``."""

    source = "banks"
    call = streamed_call(3)
    early = True

    def __init__(self, spec: KernelSpec, tile: BanksTile, constants: Mapping[str, int] | None = None) -> None:
        inputs = spec["weight"].shape[1]
        layout = BanksLayout(spec["weight"], tile.warps, tile.tasks, bool(tile.nibbles))
        numbers = {"SEGMENTS": segments_of(inputs), "RUN": run_of(inputs), **(constants or {})}
        block = (tile.warps * 32, tile.shared_bytes(inputs, narrow="FORMAT" in numbers))
        super().__init__(spec, tile, layout, (tile.tokens, tile.rows, 1), block, constants=numbers)


class CudaBanks(TiledImplement):
    """CUDA C++ on any mask, for up to 4 tokens."""

    name = "cuda-banks"
    op = "linear"
    version = 4
    first_run_compiles = True

    def supports(self, spec: KernelSpec) -> Support:
        """Bf16 and fp16 on CUDA, very few tokens, weights of which not much more than half is live."""
        return takes(spec, HALF_FORMATS) and banks_fits(spec) and nvrtc_here(AMPERE)

    def tiles(self, spec: KernelSpec) -> Sequence[object]:
        """Return the tiles that are worth timing, the best guess first."""
        return banks_tiles(spec)

    def build(self, spec: KernelSpec, params: Params) -> LinearKernel:
        """Lay out the weight; the kernel is compiled at its first run."""
        return BanksKernel(spec, BanksTile.parse(params["tile"]))


def banks_fits(spec: KernelSpec) -> Support:
    """Say whether a weight and a number of tokens are such that strips of live values may pay.

    >>> from sparta.specialize.linear.spec import linear_spec
    >>> from sparta.tesa.attribute import TeSA
    >>> banks_fits(linear_spec(TeSA.dense((16, 16)), 1, torch.bfloat16, device="cuda")).reason
    '1.00 of the weight is live; at most 0.55 pays for so many tokens'
    """
    return walking_pays(spec, _MOST_LIVE, banks_tiles)


def banks_tiles(spec: KernelSpec) -> list[BanksTile]:
    """Return tiles that fit into shared memory and keep all multiprocessors equally busy, the best guess first."""
    (outputs, inputs), width = spec["weight"].shape, walking_width(spec, _MOST_LIVE)
    density, narrow = spec["weight"].density, spec.op != "linear"
    kinds = next(kinds for least, kinds in _KINDS if density >= least)
    found = []
    for tokens in (width, width // 2) if width > 1 else (width,):
        direct = [
            BanksTile(tokens, warps, tasks, depth, nibbles, ctas)
            for nibbles, depth in kinds
            for warps, tasks, ctas in _shapes(outputs, inputs, _CTAS, _WARPS)
        ]
        copied = [
            BanksTile(tokens, warps, tasks, depth, int(density >= _NIBBLES_PAY), 1, stages)
            for depth, stages in (_COPIES if bulk_copies() else ())
            for warps, tasks, _ in _shapes(outputs, inputs, _ALONE, _COPIED_WARPS)[:1]
        ]
        fit = [
            [t for t in tiles if t.shared_bytes(inputs, narrow=narrow) <= SHARED_BYTES] for tiles in (copied, direct)
        ]
        found += [tile for pair in itertools.zip_longest(*fit) for tile in pair if tile is not None]
    return found[: _SHAPES + 2]


def _shapes(outputs: int, inputs: int, beside: Sequence[int], warps_of: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return warps, tasks and blocks of a multiprocessor such that the busiest one has the fewest outputs.

    Parameters
    ----------
    beside
        The numbers of blocks of a multiprocessor.
    warps_of
        The numbers of warps of a block.
    """
    processors = torch.cuda.get_device_properties(0).multi_processor_count if torch.cuda.is_available() else 0
    processors, segments = processors or _MULTIPROCESSORS, segments_of(inputs)
    found = []
    for ctas in beside:
        for warps in warps_of:
            for tasks in _TASKS:
                blocks = -(-outputs // (warps * tasks))
                fits = warps * tasks * segments <= _MOST_STRIPS and tasks * segments <= BANKS
                if fits and _FEWEST_WARPS <= ctas * warps <= _MOST_WARPS:
                    busiest = -(-blocks // processors) * warps * tasks
                    waits = blocks > ctas * processors
                    found.append((waits, busiest, abs(ctas * warps - 28), ctas, (warps, tasks, ctas)))
    return [shape for *_, shape in sorted(found)[:_SHAPES]]
