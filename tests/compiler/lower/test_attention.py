"""Attention under a mask of the model's own runs by kernels of kept pairs, or stays dense with a reason."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import sparta
from compiler.conftest import forcing
from sparta.compiler.graph.constants import kept_pairs
from sparta.compiler.run.ops import config_text, without_operators


class Masked(nn.Module):
    """Attention of 2 heads with a mask in a buffer, and a linear layer before it."""

    def __init__(self, mask, **options):
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.register_buffer("mask", mask)
        self.options = options

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, t, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=self.mask[..., :t, :t], **self.options)


def local(tokens=32, width=8):
    """Keep pairs in neighbouring blocks."""
    place = torch.arange(tokens) // width
    return (place[:, None] - place[None, :]).abs() <= 1


def targets(fast):
    return [str(node.target) for node in fast.graph.graph.nodes if node.op == "call_function"]


def compiled(model, x, name="blocks", **options):
    with forcing(name):
        return sparta.compile(model.eval(), x, tune="off", **options)


def agree(actual, expected):
    torch.testing.assert_close(actual, expected.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", ["bool", "float", "broadcast", "per head", "wider"])
def test_a_fixed_mask_is_skipped(form, tmp_path):
    mask = local()
    masks = {
        "bool": mask,
        "float": torch.where(mask, 0.0, -torch.inf),
        "broadcast": mask[None, None],
        "per head": torch.stack([mask, local(width=4)]),
        "wider": local(tokens=48),
    }
    model, x = Masked(masks[form]), torch.randn(3, 32, 16)
    fast = compiled(model, x)
    assert "sparta.masked_attention.default" in targets(fast)
    agree(fast(x), model(x))
    (row,) = [row for row in fast.report.rows() if row["op"] == "attention"]
    assert row["implement"] == "blocks"
    assert 0 < row["density"] < 1
    fast.save(tmp_path / "a.sparta")
    again = sparta.load(tmp_path / "a.sparta")
    agree(again(x), model(x))
    agree(torch.compile(again.graph, backend="aot_eager")(x)[0], model(x))


def test_without_python_it_is_a_plain_call():
    model, x = Masked(local()), torch.randn(3, 32, 16)
    graph = compiled(model, x).graph
    without_operators(graph.graph)
    graph.recompile()
    assert not any(str(node.target).startswith("sparta.") for node in graph.graph.nodes)
    agree(graph(x)[0], model(x))


def test_any_batch():
    model, batch = Masked(local()), torch.export.Dim("batch", min=1, max=16)
    fast = compiled(model, torch.randn(3, 32, 16), dynamic_shapes=({0: batch},))
    assert "sparta.masked_attention.default" in targets(fast)
    for size in (1, 5):
        x = torch.randn(size, 32, 16)
        agree(fast(x), model(x))


@pytest.mark.parametrize(("mask", "causal"), [(torch.ones(32, 32).tril() > 0, True), (torch.ones(32, 32) > 0, False)])
def test_a_mask_that_says_nothing_is_not_read(mask, causal):
    model, x = Masked(mask), torch.randn(2, 32, 16)
    fast = compiled(model, x)
    (call,) = [n for n in fast.graph.graph.nodes if n.target is torch.ops.aten.scaled_dot_product_attention.default]
    assert call.kwargs["is_causal"] is causal
    assert not any(t.dtype == torch.bool for t in fast.buffers())
    assert "not read any more" in fast.report.full
    agree(fast(x), model(x))


@pytest.mark.parametrize(
    ("mask", "options", "reason"),
    [
        (torch.where(local(), 0.5, -torch.inf), {}, "numbers other than 0"),
        (local(), {"scale": 0.1}, "its scale is 0.1"),
        (local() & (torch.arange(32) > 0)[:, None], {}, "see no key"),
        ((torch.arange(32) % 4 > 0)[None], {}, "stretched over 32 queries"),
    ],
)
def test_what_stays_dense_says_why(mask, options, reason):
    model, x = Masked(mask, **options), torch.randn(2, 32, 16)
    fast = compiled(model, x)
    assert "aten.scaled_dot_product_attention.default" in targets(fast)
    assert reason in fast.report.full
    agree(fast(x), model(x))


def test_a_mask_from_outside_stays_dense():
    class Given(nn.Module):
        def forward(self, q, mask):
            return functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    q = torch.randn(1, 2, 16, 8)
    fast = compiled(Given(), (q, local(16)))
    assert "computed at run time" in fast.report.full
    agree(fast(q, local(16)), Given()(q, local(16)))


def test_measured_against_dense(own_stores):
    model, x = Masked(local(64)), torch.randn(2, 64, 16)
    fast = sparta.compile(model.eval(), x, budget_s=5)
    (row,) = [row for row in fast.report.rows() if row["op"] == "attention"]
    assert row["dense_ms"] > 0
    assert row["why"]
    agree(fast(x), model(x))


@pytest.mark.parametrize("config", [config_text({"_name": "triton-flash"}), '{"_name": "blocks"}', "[]", "no JSON"])
def test_a_kernel_that_does_not_run_here_gives_way_to_dense(config):
    q, mask = torch.randn(1, 2, 32, 8), local()
    with pytest.warns(UserWarning, match="does not run here"):
        found = torch.ops.sparta.masked_attention(q, q, q, mask, config)
    agree(found, functional.scaled_dot_product_attention(q, q, q, attn_mask=mask))


def test_a_mask_that_changes_is_noticed():
    q, mask, config = torch.randn(1, 2, 32, 8), local(), config_text({"_name": "dense"})
    before = torch.ops.sparta.masked_attention(q, q, q, mask, config)
    mask.fill_(True)
    after = torch.ops.sparta.masked_attention(q, q, q, mask, config)
    agree(after, functional.scaled_dot_product_attention(q, q, q))
    assert not torch.equal(before, after)


def test_fixed_masks_are_computed_once():
    class Made(nn.Module):
        def forward(self, q):
            place = torch.arange(q.shape[-2])
            near = (place[:, None] - place[None, :]).abs() < 4
            return functional.scaled_dot_product_attention(q, q, q, attn_mask=near)

    q = torch.randn(1, 2, 16, 8)
    fast = compiled(Made(), q)
    assert targets(fast) == ["sparta.masked_attention.default"]
    agree(fast(q), Made()(q))


def test_shifted_scores_are_no_mask():
    assert kept_pairs(torch.tensor([[0.0, 1.0]])) is None
    assert kept_pairs(torch.zeros(1, 1, 2, 2)).shape == (2, 2)
