"""What a student is asked to imitate: the distributions of a teacher's outputs, or its features.

Each loss comes with its gradient in closed form, because the automatic way of distilling adds the gradient to the one
that comes from the task and never builds a graph. An output may be a tensor, a mapping or a sequence; :func:`heads_of`
makes it a plain list of named tensors, the same for student and teacher.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from sparta.errors import NameNotFoundError, ShapeError, ValueRangeError, did_you_mean, message

__all__ = [
    "OutputLoss",
    "feature_loss",
    "heads_of",
    "kind_of_output",
    "output_gradient",
    "output_loss",
    "soft_target_gradient",
    "soft_target_loss",
]

OutputLoss = Literal["kl", "mse", "cosine"]
_UNIT = 1e-3  # how far from 1 the length of a unit vector may be, also in half precision


def heads_of(outputs: Any, keys: Sequence[str | int] | None = None) -> dict[str, Tensor]:
    """Return the floating-point tensors of a model's output that are distilled, by name.

    Parameters
    ----------
    outputs
        A tensor; a mapping (also a Hugging Face model output); or a sequence.
    keys
        Which entries. By default, of a mapping ``"logits"`` if it has them, else everything of one dim or more; of a
        sequence every tensor of one dim or more. A scalar is taken for a loss and never distilled by default.

    Examples
    --------
    >>> list(heads_of({"loss": torch.tensor(1.0), "logits": torch.zeros(2, 3)}))
    ['logits']
    >>> list(heads_of((torch.zeros(2, 3), None, torch.zeros(2, 5))))
    ['0', '2']
    """
    if isinstance(outputs, Tensor):
        return {"": outputs}
    if isinstance(outputs, Mapping):
        entries: dict[str, Any] = {str(key): value for key, value in outputs.items()}
    elif isinstance(outputs, Sequence) and not isinstance(outputs, str):
        entries = {str(place): value for place, value in enumerate(outputs)}
    else:
        raise ValueRangeError(
            message(
                f"the model returns a {type(outputs).__name__}, which distillation cannot look into",
                "a tensor, a mapping or a sequence",
            )
        )
    if keys is None:
        wanted = ["logits"] if _is_head(entries.get("logits")) else [k for k, v in entries.items() if _is_head(v)]
    else:
        wanted = [str(key) for key in keys]
        for key in wanted:
            if key not in entries:
                raise NameNotFoundError(did_you_mean(key, entries, "output of the model"))
            if not isinstance(entries[key], Tensor):
                given = f"the output {key!r} is a {type(entries[key]).__name__}"
                raise ValueRangeError(message(given, "a tensor", "name tensors in distill_output_keys"))
    if not wanted:
        raise ValueRangeError(message("the model's output has no tensor to distil", "at least one floating-point one"))
    return {key: entries[key] for key in wanted}


def _is_head(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.is_floating_point()


def soft_target_loss(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Return the divergence of the student's softened distribution from the teacher's, as one number.

    ``T² · Σ KL(softmax(teacher / T) || softmax(student / T)) / (numel / last_dim)``: the mean over all distributions,
    scaled so that its gradients keep their size whatever the temperature.

    Parameters
    ----------
    student, teacher
        Logits of one shape ``(*, classes)``.

    Examples
    --------
    >>> logits = torch.tensor([[1.0, 2.0], [0.0, 0.0]])
    >>> soft_target_loss(logits, logits, 2.0).item()
    0.0
    """
    _check_shapes(student, teacher)
    log_student = torch.log_softmax(student.float() / temperature, dim=-1)
    log_teacher = torch.log_softmax(teacher.float() / temperature, dim=-1)
    divergence = (log_teacher.exp() * (log_teacher - log_student)).sum()
    return divergence * temperature**2 / _distributions(student)


def soft_target_gradient(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Return the gradient of :func:`soft_target_loss` with respect to the student's logits, as float32.

    >>> soft_target_gradient(torch.zeros(1, 2), torch.tensor([[9.0, 0.0]]), 1.0).round(decimals=2)
    tensor([[-0.5000,  0.5000]])
    """
    _check_shapes(student, teacher)
    difference = torch.softmax(student.float() / temperature, -1) - torch.softmax(teacher.float() / temperature, -1)
    return difference * (temperature / _distributions(student))


def kind_of_output(teacher: Tensor) -> OutputLoss:
    """Return the loss that an output is compared by: distributions by KL, unit vectors by angle, single numbers by MSE.

    The softmax of a unit vector is nearly even whatever the vector, so a divergence would hardly teach anything.

    >>> kind_of_output(torch.tensor([[0.6, 0.8]])), kind_of_output(torch.tensor([[3.0, 1.0]]))
    ('cosine', 'kl')
    """
    if teacher.shape[-1] == 1:
        return "mse"
    lengths = torch.linalg.vector_norm(teacher.detach().float(), dim=-1)
    is_unit = lengths.numel() > 0 and bool(((lengths - 1).abs() < _UNIT).all())
    return "cosine" if is_unit else "kl"


def output_loss(kind: OutputLoss, student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Return the loss of one output: ``kl`` as :func:`soft_target_loss`, ``mse``, or ``cosine``, the mean of 1 - cos.

    >>> output_loss("cosine", torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 2.0]]), 1.0).item()
    1.0
    """
    if kind == "kl":
        return soft_target_loss(student, teacher, temperature)
    _check_shapes(student, teacher)
    if kind == "mse":
        return torch.nn.functional.mse_loss(student.float(), teacher.float())
    return (1 - torch.nn.functional.cosine_similarity(student.float(), teacher.float(), dim=-1)).mean()


def output_gradient(kind: OutputLoss, student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Return the gradient of :func:`output_loss` with respect to the student's output, as float32.

    >>> output_gradient("mse", torch.zeros(1, 2), torch.tensor([[1.0, -1.0]]), 1.0)
    tensor([[-1.,  1.]])
    """
    if kind == "kl":
        return soft_target_gradient(student, teacher, temperature)
    _check_shapes(student, teacher)
    ours, theirs = student.float(), teacher.float()
    if kind == "mse":
        return 2 * (ours - theirs) / max(1, ours.numel())
    length = torch.linalg.vector_norm(ours, dim=-1, keepdim=True).clamp(min=1e-8)
    unit, goal = ours / length, torch.nn.functional.normalize(theirs, dim=-1)
    cosine = (unit * goal).sum(-1, keepdim=True)
    found: Tensor = (cosine * unit - goal) / length / _distributions(ours)
    return found


def feature_loss(student: Tensor, teacher: Tensor, *, normalize: bool, epsilon: float) -> Tensor:
    """Return the mean squared difference of two features, relative to the size of the teacher's if `normalize`.

    >>> feature_loss(torch.zeros(4), torch.full((4,), 2.0), normalize=True, epsilon=0.0).item()
    1.0
    """
    if student.shape != teacher.shape:
        raise ShapeError(
            message(
                f"a feature of shape {tuple(student.shape)} for the student and {tuple(teacher.shape)} for the teacher",
                "one shape",
                "choose layers that fit, or set project_features",
            )
        )
    teacher = teacher.detach().float()
    loss = (student.float() - teacher).square().mean()
    return loss / (teacher.square().mean() + epsilon) if normalize else loss


def _distributions(logits: Tensor) -> int:
    return max(1, logits.numel() // max(1, logits.shape[-1]))


def _check_shapes(student: Tensor, teacher: Tensor) -> None:
    if student.shape != teacher.shape:
        raise ShapeError(
            message(
                f"the student's output is {tuple(student.shape)} and the teacher's {tuple(teacher.shape)}",
                "the same shape",
                "use a teacher for the same classes, or name the outputs to distil in distill_output_keys",
            )
        )
