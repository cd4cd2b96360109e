"""Generate a kernel for one mask: every index becomes part of an instruction, so that none is loaded.

:func:`generate` writes C++ whose groups of rows are assembly: the sums of a group stay in registers, each input channel
is loaded once, and every live weight is one multiplication that names its register and its place. The values are still
an argument, so training on does not compile again; only another mask does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Generated", "generate"]

# Registers that hold sums, and their names; the last registers hold inputs and weights.
_SUMS = {"avx512": 24, "avx2": 12}
_VECTOR = {"avx512": ("zmm", 64), "avx2": ("ymm", 32)}
_INPUTS = {"avx512": (24, 25, 26, 27), "avx2": (12, 13)}
_WEIGHTS = {"avx2": (14, 15)}

# As in native/generated.h; without the headers there is nothing to compile but a table.
_HEAD = "struct Group { void (*multiply)(const float*, const float*, float*); long long row, value; };\n"
_TAIL = 'extern "C" __attribute__((visibility("default"))) const Group sparta_groups[] = {{{groups}}};\n'


@dataclass(frozen=True)
class Generated:
    """The text of a kernel and the order of its values.

    Attributes
    ----------
    source
        C++ that exports the table ``sparta_groups``.
    groups
        How many entries the table has.
    positions
        (live,): where in the flattened weight each value comes from.
    """

    source: str
    groups: int
    positions: NDArray[np.int64]


def generate(mask: NDArray[np.bool_], isa: str) -> Generated:
    """Return the kernel of a mask (N, K) for an instruction set with assembly, ``'avx512'`` or ``'avx2'``.

    Examples
    --------
    >>> code = generate(np.array([[True, False], [True, True]]), "avx512")
    >>> [line for line in code.source.splitlines() if "fmadd" in line]
    ['vfmadd231ps 0(%rsi){1to16}, %zmm24, %zmm0', 'vfmadd231ps 4(%rsi){1to16}, %zmm24, %zmm1',
     'vfmadd231ps 8(%rsi){1to16}, %zmm25, %zmm1']
    >>> code.positions.tolist()
    [0, 2, 3]
    """
    channels, inputs = mask.shape
    height = _SUMS[isa]
    parts, table, positions, value = [_HEAD], [], [np.zeros(0, dtype=np.int64)], 0
    for number, row in enumerate(range(0, channels, height)):
        group = mask[row : row + height]
        # Column by column: an input is loaded once for all rows of the group.
        column, lane = np.nonzero(group.T)
        positions.append((row + lane) * inputs + column)
        lines = "\n".join(_group_lines(column.tolist(), lane.tolist(), len(group), isa))
        name = f"sparta_group_{number}"
        parts.append(f'extern "C" void {name}(const float*, const float*, float*);\n')
        parts.append(f'asm(R"(\n.text\n.p2align 4\n.type {name}, @function\n{name}:\n{lines}\n)");\n')
        table.append(f"{{{name}, {row}, {value}}}")
        value += len(column)
    parts.append(_TAIL.format(groups=", ".join(table) or "{nullptr, 0, 0}"))
    return Generated("".join(parts), len(table), np.concatenate(positions))


def _group_lines(columns: list[int], lanes: list[int], rows: int, isa: str) -> Iterator[str]:
    """Yield the instructions of one group: x in %rdi, its values in %rsi, its results in %rdx."""
    register, width = _VECTOR[isa]
    for lane in range(rows):
        yield (
            f"vxorps %xmm{lane}, %xmm{lane}, %xmm{lane}" if lane < 16 else f"vpxord %zmm{lane}, %zmm{lane}, %zmm{lane}"
        )
    inputs, loaded, loads = _INPUTS[isa], -1, 0
    held = inputs[0]
    for value, (column, lane) in enumerate(zip(columns, lanes, strict=True)):
        if column != loaded:
            held, loaded, loads = inputs[loads % len(inputs)], column, loads + 1
            yield f"vmovups {column * width}(%rdi), %{register}{held}"
        if isa == "avx512":
            yield f"vfmadd231ps {4 * value}(%rsi){{1to16}}, %zmm{held}, %zmm{lane}"
        else:
            weight = _WEIGHTS[isa][value % 2]
            yield f"vbroadcastss {4 * value}(%rsi), %ymm{weight}"
            yield f"vfmadd231ps %ymm{weight}, %ymm{held}, %ymm{lane}"
    for lane in range(rows):
        yield f"vmovups %{register}{lane}, {lane * width}(%rdx)"
    yield "vzeroupper"
    yield "ret"
