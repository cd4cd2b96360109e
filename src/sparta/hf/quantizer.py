"""Sparse layers as a model is loaded: a quantizer of ours that transformers calls by itself.

``AutoModel.from_pretrained(folder, quantization_config=sparta.hf.sparse_config())`` reads the weights as ever and then
puts sparse modules in the place of layers with zeros. Nothing of it is written into the configuration, so that the
model is saved as the dense checkpoint it was.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from sparta.hf.folders import spec_of, transformers

__all__ = ["sparse_config"]

_NAME = "sparta"


def sparse_config() -> Any:
    """Return the configuration that makes ``from_pretrained`` of transformers load sparse layers."""
    return _registered()()


@cache
def _registered() -> Any:
    """Tell transformers of the quantizer, once, and return the class of its configuration."""
    transformers()
    from transformers.quantizers.auto import register_quantization_config, register_quantizer
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    @register_quantization_config(_NAME)
    class SparseConfig(QuantizationConfigMixin):
        """What transformers calls a quantization config; its method is ours."""

        def __init__(self) -> None:
            self.quant_method = _NAME  # type: ignore[assignment]  # theirs is an enum of the methods they ship

    @register_quantizer(_NAME)
    class SparseQuantizer(HfQuantizer):
        """Puts sparse modules in the place of layers with zeros after the weights are read."""

        requires_calibration = False

        def postprocess_model(self, model: Any, **_: Any) -> Any:
            from sparta.nn import swap

            swap(model, spec_of(Path(model.config.name_or_path or "."), model))
            self.remove_quantization_config(model)  # type: ignore[no-untyped-call]
            return model

        def is_serializable(self) -> bool:
            return True

        @property
        def is_trainable(self) -> bool:
            return True

    return SparseConfig
