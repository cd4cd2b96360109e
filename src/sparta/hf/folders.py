"""Sparse models in folders: written as dense checkpoints with a spec beside them, read back with sparse layers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparta.errors import FileFormatError, MissingPackageError, NameNotFoundError, message
from sparta.files import write_atomic
from sparta.hf.card import card
from sparta.tesa.spec import Spec

if TYPE_CHECKING:
    from os import PathLike

    from torch import nn

__all__ = ["SPEC_FILE", "from_pretrained", "save_pretrained", "spec_of", "transformers"]

SPEC_FILE = "sparta_spec.safetensors"


def transformers() -> Any:
    """Return the package transformers, or say what to do."""
    try:
        import transformers as package
    except ImportError as error:
        fix = "pip install transformers"
        raise MissingPackageError(message("sparta.hf needs transformers, which is not installed", fix=fix)) from error
    return package


def save_pretrained(
    model: Any, folder: str | PathLike[str], spec: Spec | None = None, *, tokenizer: Any = None, notes: str = ""
) -> Path:
    """Write a sparse model as a folder that transformers loads anywhere, with its spec and a model card.

    Parameters
    ----------
    model
        A model of transformers whose weights are pruned; sparse modules of SparTA may be inside.
    folder
        Where to write.
    spec
        What is pruned; None reads the zeros that are in the weights.
    tokenizer
        Saved beside the model where it is given.
    notes
        More for the model card, such as the accuracy that you measured.
    """
    if not hasattr(model, "save_pretrained"):
        raise NameNotFoundError(
            message(f"a {type(model).__name__} without save_pretrained", "a model of transformers", "use Spec.save")
        )
    target = Path(folder)
    if target.exists() and not target.is_dir():
        raise FileFormatError(message(f"{target} is a file", "a folder to write", "choose another name"))
    known = Spec.from_zeros(model) if spec is None else spec
    known.apply(model)
    model.save_pretrained(target)
    if tokenizer is not None:
        tokenizer.save_pretrained(target)
    if len(known):
        known.save(target / SPEC_FILE)
    write_atomic(target / "README.md", card(type(model).__name__, known, notes).encode())
    return target


def from_pretrained(
    folder: str | PathLike[str], *, kind: Any = None, spec: Spec | None = None, sparse: bool = True, **options: Any
) -> Any:
    """Read a model from a folder and put sparse modules in the place of its pruned layers.

    Parameters
    ----------
    folder
        What :func:`save_pretrained` wrote, or any folder of transformers with zeros in its weights.
    kind
        The class of transformers that reads it (``AutoModelForSequenceClassification``, say); None takes the one that
        the folder's configuration names.
    spec
        What is pruned; None takes the spec of the folder, else the zeros in the weights.
    sparse
        Whether pruned layers become sparse modules; False returns the dense model.
    options
        Handed to ``from_pretrained`` of transformers.

    Returns
    -------
    Module
        In evaluation mode. ``sparta.compile`` and ``sparta.nn.tune`` make its layers fast for the sizes you use.
    """
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise FileFormatError(message(f"{path} holds no config.json", "a folder that transformers wrote"))
    package = transformers()
    reader = _named_by(path, package) if kind is None else kind
    model = reader.from_pretrained(path, **options).eval()
    if sparse:
        from sparta.nn import swap

        swap(model, spec_of(path, model) if spec is None else spec)
    return model


def spec_of(folder: Path, model: nn.Module) -> Spec:
    """Return the spec of a folder, else what the zeros in the weights say."""
    file = folder / SPEC_FILE
    return Spec.load(file) if file.is_file() else Spec.from_zeros(model)


def _named_by(folder: Path, package: Any) -> Any:
    """Return the class that a configuration names, as transformers itself exports it."""
    config = package.AutoConfig.from_pretrained(folder)
    for name in config.architectures or ():
        found = getattr(package, str(name), None)
        if isinstance(found, type) and issubclass(found, package.PreTrainedModel):
            return found
    return package.AutoModel
