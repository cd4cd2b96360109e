"""Doors for Hugging Face transformers: sparse models to folders and back, and sparse layers as a model is loaded.

A folder stays an ordinary dense checkpoint that loads anywhere; a spec beside it says what is pruned. transformers is
imported when a function here is called, not before.
"""

from sparta.hf.folders import from_pretrained, save_pretrained
from sparta.hf.quantizer import sparse_config

__all__ = ["from_pretrained", "save_pretrained", "sparse_config"]
