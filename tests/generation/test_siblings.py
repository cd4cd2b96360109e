"""Layers that a language model's code gives one tensor run as one product: once per call, saved and loaded."""

import pytest
import torch

import sparta
from generation import language_models
from sparta.errors import FileFormatError
from sparta.generation import api, layers, siblings
from sparta.generation.layers import SparseLayer, kernel_of, layer_spec
from sparta.generation.parts import PartOfProduct
from sparta.generation.siblings import find_siblings, products_of, put_stored_products
from sparta.specialize.scaled_linear.inputs import shared_rounding
from sparta.specialize.tuning.select import DENSE, Choice
from sparta.specialize.tuning.store import Entry


def choice(outputs, start=32.0):
    """Return dense as if it had been measured: a kernel takes as long to start as so many outputs to compute."""
    return Choice(DENSE, {}, "forced", Entry(DENSE, {}, start + outputs, start + outputs))


@pytest.fixture
def anywhere(monkeypatch):
    """Let siblings be joined here, in models whose layers have kernels of their own."""
    monkeypatch.setattr(api._Compilation, "_by_program", lambda _self: None)

    def put_layers(model, tesas, rows, session):
        session.in_graphs = True  # from here on: steps are not replayed on a CPU
        return layers.put_layers(model, tesas, rows, session)

    monkeypatch.setattr(api, "put_layers", put_layers)

    def chosen(layer, tesa, rows, _known):
        choices = {count: (layer_spec(layer, tesa, count), choice(tesa.shape[0])) for count in rows}
        return kernel_of(layer, tesa, choices)

    monkeypatch.setattr(layers, "_chosen", chosen)
    monkeypatch.setattr(siblings, "choice_for", lambda spec, *_more, **_options: choice(spec["weight"].shape[0]))


@pytest.fixture
def model():
    torch.manual_seed(0)
    made = language_models.qwen2()  # whose queries, keys and values have biases
    sparta.Spec.from_pattern(made, sparta.NM(2, 4), include=["model.layers.*_proj.weight"]).apply(made)
    return made


def test_siblings_of_a_language_model_are_one_product(model, anywhere, ids, tmp_path):
    fast = sparta.compile(model, {"input_ids": ids}, tune="off")
    products = products_of(fast)
    assert sorted(len(names) for names in products) == [2, 2, 3, 3]
    query = fast.model.layers[0].self_attn.q_proj
    assert isinstance(query, SparseLayer)
    assert isinstance(query.kernel, PartOfProduct)
    with torch.no_grad():
        torch.testing.assert_close(fast(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)
    told = {layer.name: layer for layer in fast.report.plan.layers}
    names = tuple(f"model.layers.0.self_attn.{each}_proj" for each in "qkv")
    assert told[names[1]].joined == names
    assert told["model.layers.0.mlp.down_proj"].joined == ()
    together = sum(told[name].first.entry.milliseconds for name in names)
    assert together == pytest.approx(32 + sum(told[name].shape[0] for name in names))
    options = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(fast.generate(ids, **options), model.generate(ids, **options))
    fast.save(tmp_path / "model.sparta")
    again = sparta.load(tmp_path / "model.sparta")
    assert products_of(again).keys() == products.keys()
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, fast(ids).logits)


def test_a_product_is_computed_once_per_call(model, anywhere, ids, monkeypatch):
    fast = sparta.compile(model, {"input_ids": ids}, tune="off")
    attention = fast.model.layers[0].self_attn
    calls, product = [], attention.q_proj.kernel.product
    run = product.run
    monkeypatch.setattr(product, "run", lambda *given: calls.append(given) or run(*given))
    x = torch.randn(2, 3, 32)
    with torch.no_grad():
        with shared_rounding():
            found = [layer(x) for layer in (attention.q_proj, attention.k_proj, attention.v_proj)]
            assert len(calls) == 1
            attention.k_proj(x.clone())
            assert len(calls) == 2
        attention.k_proj(x)  # by itself it is as right
        assert len(calls) == 3
        plain = model.model.layers[0].self_attn
        for one, layer in zip(found, (plain.q_proj, plain.k_proj, plain.v_proj), strict=True):
            torch.testing.assert_close(one, layer(x), rtol=1e-4, atol=1e-5)


def test_products_that_are_slower_are_not_made(model, anywhere, ids, monkeypatch):
    monkeypatch.setattr(siblings, "choice_for", lambda spec, *_more, **_options: choice(2 * spec["weight"].shape[0]))
    assert not products_of(sparta.compile(model, {"input_ids": ids}, tune="off"))


def test_a_model_that_takes_no_views_keeps_its_layers(model, anywhere, ids, monkeypatch):
    def refuse(_self, _x):
        raise RuntimeError("no views")

    monkeypatch.setattr(PartOfProduct, "__call__", refuse)
    fast = sparta.compile(model, {"input_ids": ids}, tune="off")
    assert not products_of(fast)
    assert any("no views" in note for note in fast.report.notes)
    with torch.no_grad():
        torch.testing.assert_close(fast(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)


def test_siblings_are_what_gets_one_tensor(model, ids):
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    found = find_siblings(model, names, lambda: model(ids))
    assert [len(group) for group in found] == [3, 2, 3, 2]
    assert find_siblings(model, names, lambda: model("no tokens")) == []


@pytest.mark.parametrize("names", [["lm_head", "model.layers.0.mlp.up_proj"], ["nowhere", "x"], []], ids=str)
def test_a_file_that_joins_what_cannot_be_is_refused(model, names):
    with pytest.raises(FileFormatError, match="product"):
        put_stored_products(model, [{"layers": names, "choices": {}}])
