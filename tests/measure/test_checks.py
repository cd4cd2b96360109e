"""check: rounding passes, mistakes do not."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparta.errors import CheckError, ValueRangeError
from sparta.measure import Agreement, check, tolerance

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def product(m, k, n, dtype, seed=0, uneven=0.0):
    """A product in some dtype, and the truth; ``uneven`` spreads the sizes of rows and columns."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    a = (normal(m, k) * (uneven * normal(m, 1)).exp()).to(dtype)
    b = (normal(k, n) * (uneven * normal(1, n)).exp()).to(dtype)
    return a @ b, a.double() @ b.double()


class TestRoundingPasses:
    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("k", [16, 4096])
    def test_products(self, dtype, k):
        actual, expected = product(128, k, 96, dtype)
        agreement = check(actual, expected, reduction=k)
        assert 0 <= agreement.relative_error <= agreement.tolerance

    @settings(deadline=None, max_examples=100)
    @given(
        st.integers(0, 9),
        st.sampled_from([1, 2, 16, 1000]),
        st.integers(0, 9),
        st.sampled_from(FLOATS),
        st.sampled_from([0.0, 1.0]),
        st.integers(0, 2**31),
    )
    def test_products_of_any_shape_also_with_uneven_rows_and_columns(self, m, k, n, dtype, uneven, seed):
        check(*product(m, k, n, dtype, seed, uneven), reduction=k)

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_a_long_sequential_sum(self, dtype):
        # The worst order a kernel can sum in: one accumulator, one term at a time.
        a, b = (torch.randn(256, 2048, generator=torch.Generator().manual_seed(s)).to(dtype) for s in (0, 1))
        running = torch.zeros(256, dtype=torch.promote_types(dtype, torch.float32))
        for left, right in zip(a.T, b.T, strict=True):
            running = running + left.to(running.dtype) * right.to(running.dtype)
        check(running.to(dtype), (a.double() * b.double()).sum(1), reduction=2048)

    def test_tf32_passes_only_when_it_is_named(self):
        a, b = torch.randn(64, 512), torch.randn(512, 64)
        rounded = [(t.view(torch.int32) + 0x1000 & ~0x1FFF).view(torch.float32) for t in (a, b)]
        actual, expected = rounded[0] @ rounded[1], a.double() @ b.double()
        check(actual, expected, reduction=512, tf32=True)
        with pytest.raises(CheckError):
            check(actual, expected, reduction=512)

    def test_a_coarser_dtype_on_the_way_passes_only_when_it_is_named(self):
        expected = torch.rand(50)
        actual = expected.bfloat16().float()
        check(actual, expected, dtype=torch.bfloat16)
        with pytest.raises(CheckError):
            check(actual, expected)

    def test_a_single_sum_that_cancelled_is_forgiven_what_many_are_not(self):
        off, sums = 1 + 4e-5, {"reduction": 300}
        check(torch.full((1, 1), off), torch.ones(1, 1), **sums)
        with pytest.raises(CheckError):
            check(torch.full((100, 100), off), torch.ones(100, 100), **sums)
        # Not a product of two numbers, which has nothing to cancel, and not what the caller decided.
        with pytest.raises(CheckError):
            check(torch.full((1, 1), off), torch.ones(1, 1))
        with pytest.raises(CheckError):
            check(torch.full((1, 1), off), torch.ones(1, 1), rtol=1e-5, **sums)

    def test_an_element_that_cancelled_where_a_loud_row_meets_a_loud_column(self):
        loud = torch.ones(1000, dtype=torch.float64)
        loud[0] = 1000
        truth = torch.outer(loud, loud)
        truth[0, 0] = truth[0, 5] = 0
        actual = truth.float()
        actual[0, 0] = 0.01
        check(actual, truth)
        actual[0, 5] = 0.01
        with pytest.raises(CheckError, match=r"worst element \(0, 5\)"):
            check(actual, truth)

    def test_half_precision_underflow(self):
        expected = torch.linspace(1e-8, 1e-6, 100, dtype=torch.float64)
        check(expected.half(), expected)

    @pytest.mark.parametrize("scale", [1e200, 1e-200])
    def test_float64_of_any_size(self, scale):
        expected = torch.rand(10, 10, dtype=torch.float64) * scale
        assert check(expected * (1 + 1e-16), expected).relative_error < 1e-15
        with pytest.raises(CheckError):
            check(expected * (1 + 1e-12), expected)


class TestMistakesDoNot:
    @pytest.mark.parametrize("dtype", FLOATS)
    def test_one_wrong_element_of_a_million(self, dtype):
        truth = torch.randn(1000, 1000, dtype=torch.float64)
        actual = truth.to(dtype, copy=True)
        check(actual, truth)
        actual[123, 456] = actual[124, 456] + 0.5
        with pytest.raises(CheckError, match=r"worst element \(123, 456\)") as caught:
            check(actual, truth, reduction=4096)
        assert "elements off by more than rounding explains: 1 of 1000000" in str(caught.value)

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_a_wrong_element_in_a_quiet_row_beside_loud_ones(self, dtype):
        truth = torch.randn(200, 200, dtype=torch.float64)
        truth[:100] *= 1000
        # An element is judged by the louder of its row and its column, so this one's column is made quiet too.
        truth[:, 7] /= 1e6
        actual = truth.to(dtype, copy=True)
        actual[150, 7] += 5
        with pytest.raises(CheckError, match=r"worst element \(150, 7\)"):
            check(actual, truth, reduction=64)

    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("k", [64, 4096])
    def test_a_dropped_block(self, dtype, k):
        a, b = (torch.randn(s, generator=torch.Generator().manual_seed(1)).to(dtype) for s in [(256, k), (k, 256)])
        expected = a.double() @ b.double()
        kept = torch.ones(256, k, dtype=torch.bool)
        kept[32:64, 16:32] = False
        actual = ((a.double() * kept) @ b.double()).to(dtype)
        with pytest.raises(CheckError):
            check(actual, expected, reduction=k)

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_swapped_rows(self, dtype):
        actual, expected = product(1000, 64, 100, dtype)
        actual[[5, 6]] = actual[[6, 5]]
        with pytest.raises(CheckError):
            check(actual, expected, reduction=64)

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_an_error_everywhere_that_no_single_element_shows(self, dtype):
        truth = torch.rand(100, 100, dtype=torch.float64) + 1
        with pytest.raises(CheckError, match="elements off by more than rounding explains: 0 of"):
            check((truth * (1 + 2 * tolerance(dtype))).to(dtype), truth)

    def test_a_pruned_block_must_be_exactly_zero(self):
        truth = torch.rand(8, 8, dtype=torch.float64)
        truth[:4] = 0
        truth[:, :4] = 0
        actual = truth.float()
        check(actual, truth)
        actual[0, 0] = 1e-20
        with pytest.raises(CheckError, match=r"worst element \(0, 0\)"):
            check(actual, truth)

    def test_anything_for_all_zeros_unless_atol_allows_it(self):
        zeros, dust = torch.zeros(4), torch.full((4,), 1e-6)
        assert check(zeros, zeros).relative_error == 0
        with pytest.raises(CheckError, match="relative error inf"):
            check(dust, zeros)
        check(dust, zeros, atol=1e-6)

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_a_nonfinite_element_on_either_side(self, value):
        good, bad = torch.ones(3, 3), torch.ones(3, 3)
        bad[1, 2] = value
        check(bad, bad.double())
        for actual, expected in [(bad, good), (good, bad)]:
            with pytest.raises(CheckError, match="only one side is NaN or inf: 1 of 9") as caught:
                check(actual, expected)
            assert "worst element (1, 2)" in str(caught.value)

    def test_infinities_of_opposite_sign(self):
        with pytest.raises(CheckError, match="only one side is NaN or inf: 1 of 1"):
            check(torch.tensor([math.inf]), torch.tensor([-math.inf]))

    def test_an_integer_off_by_one_however_large(self):
        truth = torch.tensor([2**62, 5])
        assert check(truth, truth.clone()).tolerance == 0
        with pytest.raises(CheckError, match="int64, exact"):
            check(truth + torch.tensor([1, 0]), truth)

    def test_one_flipped_bool(self):
        with pytest.raises(CheckError, match=r"worst element \(1,\)"):
            check(torch.tensor([True, True]), torch.tensor([True, False]))

    def test_another_shape(self):
        with pytest.raises(CheckError, match=r"result has shape \(2, 1\) instead of \(2,\)"):
            check(torch.ones(2, 1), torch.ones(2))


class TestNested:
    def test_every_tensor_is_compared_and_named(self):
        truth = {"out": torch.rand(3), "grads": [torch.rand(2), (torch.rand(1), None, 2.5)]}
        assert check(truth, truth).passed
        wrong = {"out": truth["out"] + 1, "grads": [truth["grads"][0], (truth["grads"][1][0], None, 3.5)]}
        with pytest.raises(CheckError) as caught:
            check(wrong, truth, what="step")
        assert "step['out'] differs" in str(caught.value)
        assert "step['grads'][1][2] differs" in str(caught.value)
        assert "step['grads'][0]" not in str(caught.value)

    def test_the_one_nearest_to_its_limit_is_returned(self):
        near = torch.ones(4, dtype=torch.float64) * (1 + 1e-7)
        result = check([torch.ones(4), near.float()], [torch.ones(4), torch.ones(4)])
        assert result.what == "result[1]"

    @pytest.mark.parametrize(
        ("actual", "expected"),
        [
            ([torch.ones(1)], [torch.ones(1), torch.ones(1)]),
            (torch.ones(1), [torch.ones(1)]),
            ({"a": torch.ones(1)}, {"b": torch.ones(1)}),
            (torch.ones(1), {"b": torch.ones(1)}),
            (torch.ones(1), None),
            (None, torch.ones(1)),
            ("text", torch.ones(1)),
            (object(), object()),
            ([], []),
            (None, None),
        ],
    )
    def test_structures_must_be_the_same_and_hold_tensors(self, actual, expected):
        with pytest.raises(CheckError, match="; allowed: "):
            check(actual, expected)


class TestInputs:
    def test_arrays_and_numbers(self):
        read_only = np.arange(6.0)[::-1]
        read_only.flags.writeable = False
        check(read_only, torch.arange(6.0, dtype=torch.float64).flip(0))
        check(np.float32(0.1), 0.1)
        with pytest.raises(CheckError):
            check(0.1, 0.1 + 1e-12)

    def test_sparse_and_complex_and_strided_and_small_floats(self):
        dense = torch.eye(4)
        check(dense.to_sparse(), dense)
        check(torch.complex(dense, dense).conj(), torch.complex(dense, -dense))
        with pytest.raises(CheckError):
            check(torch.complex(dense, dense), torch.complex(dense, -dense))
        check(dense.mT, dense)
        eight = torch.linspace(-2, 2, 50)
        check(eight.to(torch.float8_e4m3fn), eight)
        check(eight.to(torch.float8_e5m2), eight)

    def test_gradients_are_not_followed(self):
        assert check(torch.ones(2, requires_grad=True), torch.ones(2)).passed

    def test_empty_tensors_agree(self):
        assert check(torch.ones(0, 3), torch.ones(0, 3)).worst_index is None

    def test_rtol_replaces_the_tolerance(self):
        agreement = check(torch.tensor([1.01]), torch.tensor([1.0]), rtol=0.02)
        assert agreement.tolerance == 0.02
        assert agreement.reason == "rtol as given"
        check(torch.tensor([101]), torch.tensor([100]), rtol=0.02)

    @pytest.mark.parametrize("options", [{"rtol": -1.0}, {"rtol": math.nan}, {"atol": -1.0}, {"atol": math.inf}])
    def test_tolerances_are_numbers_of_0_or_more(self, options):
        with pytest.raises(ValueRangeError, match="a number of 0 or more"):
            check(torch.ones(1), torch.ones(1), **options)

    def test_a_reduction_is_not_negative(self):
        with pytest.raises(ValueRangeError, match="reduction is -1"):
            check(torch.ones(1), torch.ones(1), reduction=-1)


class TestTolerance:
    @settings(deadline=None, max_examples=30)
    @given(st.integers(0, 10**6), st.integers(0, 10**6))
    def test_longer_sums_and_coarser_types_are_allowed_more(self, one, other):
        for dtype in FLOATS:
            assert (tolerance(dtype, one) <= tolerance(dtype, other)) == (one <= other)
        order = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
        assert sorted(order, key=lambda dtype: tolerance(dtype, one)) == order

    def test_integers_are_exact_and_tf32_is_between(self):
        assert tolerance(torch.int32, 1000) == 0
        assert tolerance(torch.bool) == 0
        assert tolerance(torch.float32) < tolerance(torch.float32, tf32=True) < tolerance(torch.bfloat16)
        assert tolerance(torch.float16, tf32=True) == tolerance(torch.float16)

    def test_a_long_half_precision_sum_still_shows_one_part_in_twenty(self):
        assert tolerance(torch.bfloat16, 4096) < 0.05


def test_an_agreement_is_plain_data_and_prints():
    agreement = check(torch.ones(2, 2), torch.ones(2, 2), what="weights")
    assert json.loads(json.dumps(agreement.to_dict(), allow_nan=False))["what"] == "weights"
    assert str(agreement).startswith("weights agrees")
    assert "\n" not in str(agreement)
    failed = Agreement("x", math.inf, 0.1, "why", 4, 1, 1, (0, 1), math.nan, 1.0, math.inf)
    assert not failed.passed
    assert json.loads(json.dumps(failed.to_dict(), allow_nan=False))["relative_error"] == "inf"
