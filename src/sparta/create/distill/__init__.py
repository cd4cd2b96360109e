"""Distillation: a student learns from a teacher's outputs or features beside its own task.

A training script needs no change; forward passes are captured and the teacher's share is added to the gradient where it
enters the student.
"""

from sparta.create.distill.capture import Capture, Pass, Target
from sparta.create.distill.losses import feature_loss, heads_of, soft_target_gradient, soft_target_loss
from sparta.create.distill.teacher import Teacher, check_teacher, frozen_copy

__all__ = [
    "Capture",
    "Pass",
    "Target",
    "Teacher",
    "check_teacher",
    "feature_loss",
    "frozen_copy",
    "heads_of",
    "soft_target_gradient",
    "soft_target_loss",
]
