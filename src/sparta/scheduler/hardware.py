"""Hardware: what pays where, and up to which sparsity it can.

Presets say which patterns and sizes gain on common hardware; a roofline says beyond which sparsity a layer waits for
memory and more zeros gain nothing. The table is yours to edit; a preset holds nominal peaks, and what really pays is
measured by `sparta.compile`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from sparta.errors import NameNotFoundError, ValueRangeError, did_you_mean, message
from sparta.sparsify.targets import TARGETS
from sparta.tables import table

__all__ = ["DEVICES", "Device", "device_of", "presets"]


@dataclass(frozen=True)
class Device:
    """What a roofline needs to know of a device, and what pays on it.

    Parameters
    ----------
    name
        How configurations call it.
    peak_macs
        Multiply-adds per second on dense operands.
    bandwidth
        Bytes per second from memory.
    bytes_per_element
        Of weights and activations.
    patterns
        Text forms of the patterns that can be faster than dense there.
    advice
        Sizes and sparsities from which they are, in words.
    """

    name: str
    peak_macs: float
    bandwidth: float
    bytes_per_element: float = 2.0
    patterns: tuple[str, ...] = ("unstructured",)
    advice: str = ""

    def __post_init__(self) -> None:
        for what in ("peak_macs", "bandwidth", "bytes_per_element"):
            if not getattr(self, what) > 0:
                raise ValueRangeError(message(f"{what} of {self.name!r} is {getattr(self, what)!r}", "above 0"))

    def useful_sparsity(self, macs: float, elements: float) -> float:
        """Return the sparsity beyond which a layer waits for memory: one minus time for memory over time for sums.

        Parameters
        ----------
        macs
            Multiply-adds of the dense layer.
        elements
            Elements read and written: weight, input and output.

        Examples
        --------
        >>> Device("toy", peak_macs=1e9, bandwidth=1e9, bytes_per_element=1).useful_sparsity(4e6, 1e6)
        0.75
        """
        if macs <= 0:
            return 0.0
        time_io = elements * self.bytes_per_element / self.bandwidth
        return 1.0 - min(1.0, time_io / (macs / self.peak_macs))


DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device(
            "generic",
            1e12,
            1e11,
            4.0,
            TARGETS["generic"],
            "whole channels always pay once the model is compacted; single zeros from about 90 %",
        ),
        Device(
            "nvidia-ampere",
            156e12,
            2.0e12,
            2.0,
            TARGETS["nvidia-ampere"],
            "2:4 in fp16/bf16/int8 with output channels a multiple of 8 and input channels of 16, large batches; "
            "blocks from about 70 %",
        ),
        Device(
            "nvidia-hopper",
            494e12,
            3.35e12,
            2.0,
            TARGETS["nvidia-hopper"],
            "2:4 as on Ampere, also fp8; blocks of 64 and more from about 70 %",
        ),
        Device(
            "x86-avx512",
            2.5e12,
            2.0e11,
            4.0,
            TARGETS["x86-avx512"],
            "blocks of 4 or 16 neighbouring outputs from about 70 %; int8 with VNNI in blocks of 4",
        ),
    )
}
"""The presets by name. Add your own, or pass a dictionary of its fields where a name is expected."""


def device_of(given: str | Device | Mapping[str, Any]) -> Device:
    """Return a device from a preset's name, a dictionary of fields, or itself.

    >>> device_of({"name": "mine", "peak_macs": 1e12, "bandwidth": 5e10}).bytes_per_element
    2.0
    """
    if isinstance(given, Device):
        return given
    if isinstance(given, str):
        if given not in DEVICES:
            raise NameNotFoundError(did_you_mean(given, DEVICES, "device preset"))
        return DEVICES[given]
    known = [field.name for field in fields(Device)]
    for key in given:
        if key not in known:
            raise NameNotFoundError(did_you_mean(str(key), known, "field of a device:"))
    missing = {"peak_macs", "bandwidth"} - given.keys()
    if missing:
        raise ValueRangeError(message(f"a device without {sorted(missing)}", "peak_macs and bandwidth"))
    return Device(**{"name": "custom", **given})


def presets() -> str:
    """Return the presets as a table: which patterns and sizes pay where."""
    rows = [[d.name, d.peak_macs, d.bandwidth, " ".join(d.patterns), d.advice] for d in DEVICES.values()]
    return table(["device", "MAC/s", "bytes/s", "patterns that pay", "when"], rows)
