"""Recovery: what a pruned model lost is learnt back from its dense self, and its zeros stay.

:func:`recover` is one call for all of it: blocks first, then the whole model's outputs. :func:`add_lora` puts masked
low-rank adapters on a sparse model for a training loop of one's own; :func:`mask_peft` does the same for
adapters of peft; :func:`prune_by_config` runs configurations of
MSBench for trained models.
"""

from sparta.arguments import front_door
from sparta.recovery.api import recover
from sparta.recovery.log import RecoveryLog, StageLog
from sparta.recovery.lora import Adapters, MaskedLoRA, add_lora
from sparta.recovery.peft import mask_peft
from sparta.recovery.post_training import prune_by_config

__all__ = ["Adapters", "MaskedLoRA", "RecoveryLog", "StageLog", "add_lora", "mask_peft", "prune_by_config", "recover"]

front_door(globals(), ["add_lora", "mask_peft", "prune_by_config", "recover"])
