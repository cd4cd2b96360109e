"""The certificate: that a compiled model agreed with its original, on which inputs, and how well."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sparta.compiler.numbers import a_flag, a_number, a_whole_number

__all__ = ["Certificate"]


@dataclass(frozen=True)
class Certificate:
    """That a compiled model agreed with its original: what was compared, how, and how well.

    Parameters
    ----------
    seeds
        Of the fresh inputs; the example inputs were compared as well.
    tolerance
        The largest relative error that passes; the dtype says why.
    error
        The largest relative error that was measured.
    worst
        The largest difference of one element, over the largest element of its output.
    outputs
        How many output tensors were compared.
    passed
        Whether all agreed; False only where verification was switched off.
    """

    seeds: tuple[int, ...]
    dtype: str
    tolerance: float
    error: float
    worst: float
    outputs: int
    passed: bool

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {**asdict(self), "seeds": list(self.seeds)}

    @staticmethod
    def from_dict(fields: Mapping[str, Any]) -> Certificate:
        """Return what :meth:`to_dict` wrote."""
        return Certificate(
            tuple(a_whole_number(seed, "a seed") for seed in fields["seeds"]),
            str(fields["dtype"]),
            a_number(fields["tolerance"], "the tolerance"),
            a_number(fields["error"], "the error"),
            a_number(fields["worst"], "the error"),
            a_whole_number(fields["outputs"], "the number of outputs"),
            a_flag(fields["passed"], "whether it passed"),
        )

    def __str__(self) -> str:
        if not self.passed:
            return "not verified"
        drawn = f" and of seeds {', '.join(map(str, self.seeds))}" if self.seeds else ""
        return (
            f"verified: relative error {self.error:.2g} of {self.tolerance:.2g} allowed in {self.dtype}, "
            f"{self.outputs} outputs, inputs of the example{drawn}"
        )
