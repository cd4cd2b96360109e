"""Where a model on the command line comes from, and what it is called with.

A model is ``package.module:factory`` (a function of yours that returns a module, or a module and example inputs) or a
folder that transformers wrote. Inputs are written as shapes: ``1x128`` is a float tensor, ``ids:1x128`` holds tokens.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparta.errors import FileFormatError, MissingPackageError, NameNotFoundError, ValueRangeError, message

if TYPE_CHECKING:
    from torch import nn

__all__ = ["inputs_of", "model_and_data", "model_of", "with_batch"]

_SHAPE = re.compile(r"(?:(?P<kind>float|ids|bool|[A-Za-z_]\w*)[:=])?(?P<sizes>\d+(?:x\d+)*)")
_TOKENS = 1000


def model_of(source: str) -> tuple[nn.Module, Any]:
    """Return a model in evaluation mode and the example inputs that came with it, or None."""
    return model_and_data(source)[:2]


def model_and_data(source: str) -> tuple[nn.Module, Any, Any]:
    """Return a model in evaluation mode, and the example inputs and the data that came with it, or None."""
    from torch import nn

    if ":" in source and not Path(source).exists():
        made = _factory(source)()
    elif Path(source).is_dir():
        made = _from_folder(Path(source))
    else:
        allowed = "package.module:factory, or a folder that transformers wrote"
        raise ValueRangeError(message(f"the model {source!r}", allowed, "sparta load reads compiled models"))
    model, example, data = (*made, None, None)[:3] if isinstance(made, tuple) else (made, None, None)
    if not isinstance(model, nn.Module):
        given = f"{source} returned a {type(model).__name__}"
        raise ValueRangeError(message(given, "a torch.nn.Module, or a module and its example inputs"))
    return model.eval(), example, data


def _factory(source: str) -> Any:
    """Return the function that a name of the user's own code leads to."""
    name, _, attribute = source.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # as python -m does
    try:
        module = import_module(name)
    except ImportError as error:
        fix = "run it from the folder that holds the module, or install it"
        raise NameNotFoundError(message(f"the module {name!r}: {error}", fix=fix)) from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise NameNotFoundError(message(f"{attribute!r} of {name}", "a function of that module that returns a model"))
    return factory


def _from_folder(folder: Path) -> Any:
    """Return the model of a folder that transformers wrote, with tokens to call it."""
    if not (folder / "config.json").is_file():
        raise FileFormatError(message(f"{folder} holds no config.json", "a folder that transformers wrote"))
    try:
        import transformers
    except ImportError as error:
        raise MissingPackageError(
            message("a folder of transformers needs it installed", fix="pip install transformers")
        ) from error
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    names = config.architectures or ()
    of_language = any(name.endswith("ForCausalLM") for name in names)
    kind = transformers.AutoModelForCausalLM if of_language else transformers.AutoModel
    return kind.from_pretrained(folder, local_files_only=True)


def inputs_of(shapes: Sequence[str], model: nn.Module) -> Any:
    """Return example inputs for shapes; names before a shape make it a keyword argument.

    >>> from torch import nn
    >>> inputs_of(["2x3"], nn.Identity()).shape
    torch.Size([2, 3])
    >>> sorted(inputs_of(["input_ids=1x8", "attention_mask=1x8"], nn.Identity()))
    ['attention_mask', 'input_ids']
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for shape in shapes:
        found = _SHAPE.fullmatch(shape)
        if found is None:
            fix = "such as 1x128, ids:1x128 or attention_mask=1x128"
            raise ValueRangeError(message(f"--input {shape!r}", "sizes joined by x", fix))
        sizes, kind = [int(size) for size in found["sizes"].split("x")], found["kind"] or "float"
        if kind == "float":
            positional.append(torch.randn(sizes, generator=generator))
        elif kind == "bool":
            positional.append(torch.ones(sizes, dtype=torch.bool))
        elif kind == "ids":
            positional.append(torch.randint(min(_TOKENS, _words(model)), sizes, generator=generator))
        elif "mask" in kind:
            named[kind] = torch.ones(sizes, dtype=torch.int64)
        elif kind.endswith("ids"):
            named[kind] = torch.randint(min(_TOKENS, _words(model)), sizes, generator=generator)
        else:
            named[kind] = torch.randn(sizes, generator=generator)
    if positional and named:
        raise ValueRangeError(message("inputs with and without names", "all of one kind"))
    return named or (positional[0] if len(positional) == 1 else tuple(positional))


def _words(model: nn.Module) -> int:
    words = getattr(getattr(model, "config", None), "vocab_size", None)
    return words if isinstance(words, int) and words > 0 else _TOKENS


def with_batch(example: Any, batch: int) -> Any:
    """Return the example with another first size: its first element repeated."""
    import torch

    def sized(value: Any) -> Any:
        return value[:1].expand(batch, *value.shape[1:]).contiguous() if isinstance(value, torch.Tensor) else value

    if isinstance(example, dict):
        return {name: sized(value) for name, value in example.items()}
    return tuple(map(sized, example)) if isinstance(example, tuple) else sized(example)
