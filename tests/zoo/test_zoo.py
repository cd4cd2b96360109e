"""A few models of the zoo, as they come: captured by their default call, exact, kept in a file, at another batch size.

All of them are run by `make zoo`; SPARTA_LONG=1 takes some more here.
"""

import os
import pickle

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from propagation.architectures import plant
from sparta.propagation import compact
from sparta.propagation.caches import without_caches
from zoo import language, pictures

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
WRITTEN = ("lstm tagger", "fourier operator", "transformer", "deep and cross", "pixel shuffle")
LONG = ("swin-v2", "convnext-v2", "whisper", "llama") if os.environ.get("SPARTA_LONG") else ()
TRANSFORMERS = ("deberta-v2", "mamba", "t5", *LONG)


def called(model, inputs):
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    with torch.no_grad(), without_caches(model):
        return [t for t in pytree.tree_leaves(model(*args, **kwargs)) if isinstance(t, Tensor)]


@pytest.mark.parametrize("name", [*WRITTEN, *TRANSFORMERS])
def test_a_model_as_it_comes(name):
    if name in TRANSFORMERS:
        pytest.importorskip("transformers")
        model, inputs = language.build(name)
    else:
        model, inputs = pictures.build("written", name)
    plant(model)
    small = pickle.loads(pickle.dumps(compact(model, inputs)))  # noqa: S301 - our own
    more = pytree.tree_map(lambda t: torch.cat([t, t[:1]]), inputs)
    for given in (inputs, more):
        for one, two in zip(called(small, given), called(model, given), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)
    assert sum(p.numel() for p in small.parameters()) <= sum(p.numel() for p in model.parameters())


def test_every_row_is_told_apart():
    rows = [*language.ROWS, *pictures.TIMM, *pictures.TORCHVISION, *pictures.WRITTEN]
    assert len(rows) >= 100
    assert all(len(row) == 4 for row in language.ROWS.values())
