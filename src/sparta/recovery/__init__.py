"""Recovery: what a pruned model lost is learnt back from its dense self, and its zeros stay.

:func:`recover` is one call for all of it: blocks first, then the whole model's outputs. :func:`add_lora` puts masked
low-rank adapters on a sparse model for a training loop of one's own.
"""

from sparta.arguments import front_door
from sparta.recovery.api import recover
from sparta.recovery.log import RecoveryLog, StageLog
from sparta.recovery.lora import Adapters, MaskedLoRA, add_lora

__all__ = ["Adapters", "MaskedLoRA", "RecoveryLog", "StageLog", "add_lora", "recover"]

front_door(globals(), ["add_lora", "recover"])
