"""A few of the models that `make zoo` compiles: whole or in part, exact, at another batch size, and from a file."""

import pytest
import torch

import sparta
from propagation.architectures import plant
from zoo import composed, language, pictures


@pytest.mark.parametrize(
    ("source", "name"),
    [("written", "pointnet"), ("written", "lstm tagger"), ("written", "deep and cross"), ("transformers", "bert")],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_models_that_nobody_tuned_for(source, name, tmp_path):
    if source == "transformers":
        pytest.importorskip("transformers")
        model, kwargs = language.build(name)
        args = ()
    else:
        (model, args), kwargs = pictures.build(source, name), {}
    model = plant(model)
    fast = sparta.compile(model, kwargs or args, tune="off")
    fast.save(tmp_path / "model.sparta")
    loaded = sparta.load(tmp_path / "model.sparta")
    more = [torch.cat([x, x[:1]]) for x in args], {key: torch.cat([x, x[:1]]) for key, x in kwargs.items()}
    with torch.no_grad():
        for positional, named in ((args, kwargs), more):
            expected = leaves(model(*positional, **named))
            for run in (fast, loaded):
                found = leaves(run(*positional, **named))
                assert len(found) == len(expected)
                for one, two in zip(found, expected, strict=True):
                    torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["gpt-oss", "whisper", "llava"])  # a window that is full; speech; pictures in text
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_language_models_that_nobody_tuned_for(name, tmp_path):
    pytest.importorskip("transformers")
    model, inputs = (language if name in language.ROWS else composed).build(name)
    model = plant(model)
    fast = sparta.compile(model, inputs, tune="off")
    fast.save(tmp_path / "model.sparta")
    given = {key: value for key, value in inputs.items() if not key.startswith("decoder_")}
    expected = model.generate(**given, max_new_tokens=5, do_sample=False)
    for run in (fast, sparta.load(tmp_path / "model.sparta")):
        assert torch.equal(run.generate(**given, max_new_tokens=5, do_sample=False), expected)


def leaves(result):
    return [leaf for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
