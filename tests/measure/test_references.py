"""References: equal to torch's dense operators where nothing is pruned, exact about what is."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from sparta.errors import ShapeError, ValueRangeError
from sparta.measure import (
    attention_reference,
    conv_reference,
    linear_reference,
    matmul_reference,
    moe_reference,
    softmax_backward_reference,
    softmax_reference,
    sparse_multi_head_attention_reference,
    sparse_softmax_backward_reference,
    sparse_softmax_forward_reference,
)

sizes = st.integers(0, 6)
seeds = st.integers(0, 2**31)
half = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])


def close(actual, expected):
    assert actual.dtype == torch.float64
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def random_mask(*shape, seed=0, density=0.5):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < density


def poisoned(x, mask):
    """The tensor with NaN and inf in all pruned places."""
    poison = torch.where(torch.arange(x.numel()).reshape(x.shape) % 2 == 0, math.nan, math.inf)
    return torch.where(mask.expand(x.shape), x, poison.to(x.dtype))


class TestMatmul:
    @settings(deadline=None, max_examples=30)
    @given(sizes, sizes, sizes, st.booleans(), st.booleans(), half, seeds)
    def test_with_nothing_pruned_it_is_torch(self, m, k, n, transpose_a, transpose_b, dtype, seed):
        a, b, bias = random(m, k, seed=seed, dtype=dtype), random(k, n, seed=seed + 1, dtype=dtype), random(n)
        result = matmul_reference(
            a.mT if transpose_a else a,
            b.mT if transpose_b else b,
            transpose_A=transpose_a,
            transpose_B=transpose_b,
            A_mask=torch.ones((), dtype=torch.bool),
            bias=bias,
        )
        close(result, a.double() @ b.double() + bias.double())

    @settings(deadline=None, max_examples=30)
    @given(seeds)
    def test_pruned_elements_never_contribute_whatever_they_hold(self, seed):
        a, b, bias = random(2, 4, 5, seed=seed), random(5, 3, seed=seed + 1), random(3, seed=seed)
        a_mask, b_mask, c_mask = (random_mask(*s, seed=seed + 2) for s in [(2, 4, 5), (5, 3), (4, 3)])
        result = matmul_reference(
            poisoned(a, a_mask), poisoned(b, b_mask), A_mask=a_mask, B_mask=b_mask, C_mask=c_mask, bias=bias
        )
        close(result, ((a.double() * a_mask) @ (b.double() * b_mask) + bias.double()) * c_mask)

    def test_masks_are_in_the_layout_of_their_operand(self):
        a, mask = random(3, 4), random_mask(3, 4)
        result = matmul_reference(poisoned(a, mask), random(3, 2), A_mask=mask, transpose_A=True)
        close(result, (a.double() * mask).mT @ random(3, 2).double())

    def test_a_live_nan_spreads_as_in_the_dense_model(self):
        a = torch.tensor([[math.nan, 1.0]])
        kept = torch.tensor([[True, False]])
        assert matmul_reference(a, torch.zeros(2, 1), A_mask=kept).isnan().all()

    def test_gradients_of_pruned_elements_are_zero(self):
        a = random(3, 4).requires_grad_()
        mask = random_mask(3, 4)
        matmul_reference(a, random(4, 2), A_mask=mask).sum().backward()
        assert (a.grad[~mask] == 0).all()
        assert (a.grad[mask] != 0).all()

    def test_inner_sizes_must_agree(self):
        with pytest.raises(ShapeError, match="check transpose_A and transpose_B"):
            matmul_reference(torch.ones(2, 3), torch.ones(2, 3))

    def test_vectors_are_refused(self):
        with pytest.raises(ShapeError, match="two dimensions or more"):
            matmul_reference(torch.ones(3), torch.ones(3, 2))

    def test_a_mask_that_does_not_broadcast_is_an_error(self):
        with pytest.raises(ShapeError, match=r"B_mask of shape \(2, 2\)"):
            matmul_reference(torch.ones(2, 3), torch.ones(3, 2), B_mask=torch.ones(2, 2, dtype=torch.bool))

    def test_an_additive_mask_is_an_error(self):
        with pytest.raises(ValueRangeError, match="mask > -inf"):
            matmul_reference(torch.ones(2, 3), torch.ones(3, 2), A_mask=torch.zeros(2, 3))

    def test_integer_masks_mean_nonzero(self):
        mask = torch.tensor([[1, 0]], dtype=torch.uint8)
        assert matmul_reference(torch.ones(1, 2), torch.ones(2, 1), A_mask=mask).item() == 1


class TestLinear:
    @settings(deadline=None, max_examples=30)
    @given(sizes, sizes, sizes, half, seeds)
    def test_with_nothing_pruned_it_is_torch(self, m, k, n, dtype, seed):
        x, w, b = random(2, m, k, seed=seed, dtype=dtype), random(n, k, seed=seed, dtype=dtype), random(n, dtype=dtype)
        close(linear_reference(x, w, b), functional.linear(x.double(), w.double(), b.double()))
        close(linear_reference(x, w), functional.linear(x.double(), w.double()))

    def test_all_three_masks(self):
        x, w, b = random(4, 5), random(3, 5), random(3)
        x_mask, w_mask, y_mask = random_mask(4, 5, seed=1), random_mask(3, 5, seed=2), random_mask(4, 3, seed=3)
        result = linear_reference(
            poisoned(x, x_mask), poisoned(w, w_mask), b, input_mask=x_mask, weight_mask=w_mask, output_mask=y_mask
        )
        close(result, functional.linear(x.double() * x_mask, w.double() * w_mask, b.double()) * y_mask)

    @pytest.mark.parametrize(("x", "w"), [((2, 3), (4, 2)), ((), (4, 2)), ((2, 3), (3,))])
    def test_shapes_must_fit(self, x, w):
        with pytest.raises(ShapeError, match=r"x \(..., K\) and weight \(N, K\)"):
            linear_reference(torch.ones(x), torch.ones(w))


class TestConv:
    @pytest.mark.parametrize("dims", [1, 2, 3])
    @pytest.mark.parametrize(
        "options", [{}, {"stride": 2, "padding": 1}, {"dilation": 2, "padding": "same"}, {"groups": 2}]
    )
    @pytest.mark.parametrize("batched", [True, False])
    def test_it_is_torch_with_pruned_weights_at_zero(self, dims, options, batched):
        x = random(*([2] if batched else []), 4, *[6] * dims)
        w, b = random(6, 4 // options.get("groups", 1), *[3] * dims), random(6)
        mask = random_mask(*w.shape)
        conv = getattr(functional, f"conv{dims}d")
        expected = conv(x.double(), w.double() * mask, b.double(), **options)
        close(conv_reference(x, poisoned(w, mask), b, weight_mask=mask, **options), expected)
        close(conv_reference(x, w, **options), conv(x.double(), w.double(), **options))

    @pytest.mark.parametrize(("x", "w"), [((2, 3), (4, 2)), ((1, 1, 5, 5), (1, 1, 3)), ((5,), (1, 1, 3))])
    def test_ranks_must_fit(self, x, w):
        with pytest.raises(ShapeError, match="3 to 5 dimensions"):
            conv_reference(torch.ones(x), torch.ones(w))


class TestSoftmax:
    @settings(deadline=None, max_examples=40)
    @given(st.integers(1, 5), st.integers(1, 7), st.floats(0.1, 10), st.sampled_from([0.0, 0.3, 1.0]), seeds)
    def test_rows_sum_to_1_over_the_kept_or_are_0(self, rows, width, temperature, density, seed):
        x, mask = random(rows, width, seed=seed), random_mask(rows, width, seed=seed, density=density)
        y = softmax_reference(poisoned(x, mask), mask, temperature)
        assert (y[~mask] == 0).all()
        close(y.sum(-1), mask.any(-1).double())

    @settings(deadline=None, max_examples=20)
    @given(sizes, sizes, st.floats(0.1, 10), half, seeds)
    def test_with_nothing_pruned_it_is_torch(self, rows, width, temperature, dtype, seed):
        x = random(rows, width, seed=seed, dtype=dtype)
        close(softmax_reference(x, temperature=temperature), torch.softmax(x.double() / temperature, -1))

    def test_a_huge_pruned_element_does_not_make_the_kept_underflow(self):
        x, mask = torch.tensor([[0.0, 1.0, 1e6]]), torch.tensor([[True, True, False]])
        close(softmax_reference(x, mask)[:, :2], torch.softmax(x[:, :2].double(), -1))

    def test_a_mask_is_shared_by_all_batches(self):
        x, mask = random(3, 2, 4), random_mask(2, 4)
        for batch, result in zip(x, softmax_reference(x, mask), strict=True):
            close(result, softmax_reference(batch, mask))

    @settings(deadline=None, max_examples=30)
    @given(st.integers(1, 4), st.integers(0, 6), st.floats(0.2, 5), st.sampled_from([0.0, 0.5, 1.0]), seeds)
    def test_backward_is_what_autograd_finds(self, rows, width, temperature, density, seed):
        x = random(rows, width, seed=seed, dtype=torch.float64).requires_grad_()
        mask, grad = random_mask(rows, width, seed=seed, density=density), random(rows, width, seed=seed + 1)
        y = softmax_reference(x, mask, temperature)
        y.backward(grad.double())
        close(softmax_backward_reference(poisoned(grad, mask), y.detach(), mask, temperature), x.grad)

    def test_forward_has_the_derivative_of_finite_differences(self):
        mask = torch.tensor([[True, True, False], [False, False, False], [True, True, True]])
        x = random(3, 3, dtype=torch.float64).requires_grad_()
        assert torch.autograd.gradcheck(lambda t: softmax_reference(t, mask, 0.7), (x,))

    @pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
    def test_the_temperature_must_be_positive(self, temperature):
        x = torch.ones(1, 2)
        with pytest.raises(ValueRangeError, match="temperature is"):
            softmax_reference(x, temperature=temperature)
        with pytest.raises(ValueRangeError, match="temperature is"):
            softmax_backward_reference(x, x, temperature=temperature)

    def test_the_names_of_the_original(self):
        x, mask = random(4, 6), random_mask(4, 6)
        y = sparse_softmax_forward_reference(x, mask, 2.5)
        close(y, softmax_reference(x, mask, temperature=2.5))
        grad = random(4, 6, seed=1)
        close(sparse_softmax_backward_reference(grad, y, mask, 2.5), softmax_backward_reference(grad, y, mask, 2.5))


class TestAttention:
    @settings(deadline=None, max_examples=30)
    @given(st.integers(1, 5), st.integers(1, 5), st.sampled_from([(4, 4), (4, 2), (4, 1)]), st.booleans(), seeds)
    def test_with_nothing_pruned_it_is_torch(self, m, n, heads, causal, seed):
        q, k = random(2, heads[0], m, 3, seed=seed), random(2, heads[1], n, 3, seed=seed + 1)
        v = random(2, heads[1], n, 5, seed=seed + 2)
        expected = functional.scaled_dot_product_attention(
            q.double(), k.double(), v.double(), is_causal=causal, enable_gqa=True
        )
        close(attention_reference(q, k, v, causal=causal), expected)

    @settings(deadline=None, max_examples=30)
    @given(seeds, st.sampled_from([(2, 3, 4, 5), (1, 3, 4, 5), (2, 1, 4, 5), (4, 5), (3, 1, 1)]))
    def test_masks_by_batch_and_head_are_those_of_torch(self, seed, mask_shape):
        q, k, v = random(2, 3, 4, 6, seed=seed), random(2, 3, 5, 6, seed=seed + 1), random(2, 3, 5, 2, seed=seed + 2)
        mask = random_mask(*mask_shape, seed=seed, density=0.6)
        expected = functional.scaled_dot_product_attention(
            q.double(), k.double(), v.double(), attn_mask=mask.expand(2, 3, 4, 5), scale=0.3
        )
        blind = ~mask.expand(2, 3, 4, 5).any(-1)
        result = attention_reference(q, k, v, mask, scale=0.3)
        assert (result[blind] == 0).all()
        close(result[~blind], expected[~blind])

    def test_without_heads(self):
        q, k, v, mask = random(4, 3), random(5, 3, seed=1), random(5, 2, seed=2), random_mask(4, 5, density=0.8)
        close(attention_reference(q, k, v, mask), attention_reference(q[None], k[None], v[None], mask)[0])

    @settings(deadline=None, max_examples=20)
    @given(st.lists(st.integers(0, 5), min_size=3, max_size=3), st.booleans(), seeds)
    def test_padding_is_as_if_it_were_not_there(self, lengths, causal, seed):
        q, k, v = (random(3, 2, 5, 4, seed=seed + i) for i in range(3))
        for tensor in (q, k, v):
            for batch, length in enumerate(lengths):
                tensor[batch, :, length:] = math.nan
        result = attention_reference(q, k, v, causal=causal, seqlens=torch.tensor(lengths))
        for batch, length in enumerate(lengths):
            inside = [tensor[batch, :, :length] for tensor in (q, k, v)]
            close(result[batch, :, :length], attention_reference(*inside, causal=causal))
            assert (result[batch, :, length:] == 0).all()

    def test_an_unseen_value_never_reaches_a_query_whatever_it_holds(self):
        q, k, v = random(2, 4, 3), random(2, 4, 3, seed=1), random(2, 4, 3, seed=2)
        future = v.clone()
        future[:, 3] = math.inf
        result = attention_reference(q, k, future, causal=True)
        close(result[:, :3], attention_reference(q, k, v, causal=True)[:, :3])
        assert (result[:, 3] == math.inf).all()

    def test_the_name_of_the_original(self):
        q, k, v, mask = random(2, 4, 9), random(2, 5, 9, seed=1), random(2, 5, 3, seed=2), random_mask(4, 5)
        close(sparse_multi_head_attention_reference(q, k, v, mask), attention_reference(q, k, v, mask))
        result = sparse_multi_head_attention_reference(q, k, v, mask, T=2.0)
        close(result, attention_reference(q, k, v, mask, scale=0.5))

    @pytest.mark.parametrize(
        ("q", "k", "v"),
        [
            ((2, 4, 3), (2, 5, 4), (2, 5, 4)),
            ((2, 4, 3), (2, 5, 3), (2, 6, 3)),
            ((2, 4, 3), (5, 3), (5, 3)),
            ((3,), (3,), (3,)),
        ],
    )
    def test_shapes_must_fit(self, q, k, v):
        with pytest.raises(ShapeError, match="kv_heads, N, F"):
            attention_reference(torch.ones(q), torch.ones(k), torch.ones(v))

    @pytest.mark.parametrize("kv", [(1, 3, 5, 2), (2, 4, 5, 2), (2, 0, 5, 2)])
    def test_heads_must_be_a_multiple_and_batches_equal(self, kv):
        with pytest.raises(ShapeError, match="heads a multiple of kv_heads"):
            attention_reference(torch.ones(2, 3, 4, 2), torch.ones(kv), torch.ones(kv))

    def test_seqlens_are_one_for_each_batch_of_a_square(self):
        x = torch.ones(2, 3, 4, 2)
        with pytest.raises(ShapeError, match="one length for each"):
            attention_reference(x, x, x, seqlens=[1, 2, 3])
        with pytest.raises(ShapeError, match="give a mask for cross-attention"):
            attention_reference(x, x[:, :, :2], x[:, :, :2], seqlens=[1, 2])

    @pytest.mark.parametrize("lengths", [[1, 5], [-1, 2]])
    def test_seqlens_lie_within_the_sequence(self, lengths):
        x = torch.ones(2, 3, 4, 2)
        with pytest.raises(ValueRangeError, match="integers from 0 to 4"):
            attention_reference(x, x, x, seqlens=lengths)


class TestMixtureOfExperts:
    @settings(deadline=None, max_examples=30)
    @given(st.integers(0, 7), st.integers(1, 4), st.integers(1, 3), st.booleans(), st.booleans(), seeds)
    def test_each_token_gets_the_gated_sum_of_its_experts(self, tokens, experts, choices, biased, gated, seed):
        x, w, b = random(tokens, 5, seed=seed), random(experts, 3, 5, seed=seed + 1), random(experts, 3, seed=seed + 2)
        ids = torch.randint(experts, (tokens, choices), generator=torch.Generator().manual_seed(seed))
        gates = random(tokens, choices, seed=seed + 3).abs()
        result = moe_reference(x, ids, w, b if biased else None, gates if gated else None)
        for token in range(tokens):
            expected = torch.zeros(3, dtype=torch.float64)
            for choice in range(choices):
                expert = int(ids[token, choice])
                answer = w[expert].double() @ x[token].double() + (b[expert].double() if biased else 0.0)
                expected += answer * (gates[token, choice].double() if gated else 1.0)
            close(result[token], expected)
        assert result.shape == (tokens, 3)

    def test_one_expert_each_and_lists_of_weights(self):
        x, w, b = random(6, 4), random(3, 2, 4), random(3, 2)
        ids = torch.tensor([0, 2, 1, 1, 0, 2], dtype=torch.int32)
        expected = torch.stack([w[e].double() @ t.double() + b[e].double() for t, e in zip(x, ids, strict=True)])
        close(moe_reference(x, ids, list(w), list(b)), expected)

    def test_an_expert_that_overflows_reaches_only_its_own_tokens(self):
        w = torch.tensor([[[1.0]], [[math.inf]]])
        assert moe_reference(torch.ones(2, 1), torch.tensor([0, 1]), w).tolist() == [[1.0], [math.inf]]

    @pytest.mark.parametrize("ids", [[0, 2], [-1, 0]])
    def test_ids_name_experts(self, ids):
        with pytest.raises(ValueRangeError, match="integers from 0 to 1"):
            moe_reference(torch.ones(2, 3), torch.tensor(ids), torch.ones(2, 4, 3))

    def test_there_are_experts(self):
        with pytest.raises(ValueRangeError, match="no experts"):
            moe_reference(torch.ones(2, 3), torch.tensor([0, 0]), [])

    @pytest.mark.parametrize(("tokens", "ids"), [((2, 3), (3,)), ((2, 3, 4), (2,)), ((2, 3), (2, 1, 1))])
    def test_ids_are_one_row_for_each_token(self, tokens, ids):
        with pytest.raises(ShapeError, match=r"\(T,\) or \(T, k\)"):
            moe_reference(torch.ones(tokens), torch.zeros(ids, dtype=torch.long), torch.ones(2, 4, 3))

    def test_gates_have_the_shape_of_ids(self):
        with pytest.raises(ShapeError, match="gates of shape"):
            moe_reference(torch.ones(2, 3), torch.zeros(2, dtype=torch.long), torch.ones(2, 4, 3), gates=torch.ones(3))
