"""The fused attention kernels, run by Triton's interpreter, compute what dense attention under the mask computes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparta.errors import MissingPackageError
from sparta.specialize.attention.op import flash_attention
from sparta.specialize.attention.spec import attention_spec
from sparta.specialize.attention.tile import AttentionTile
from sparta.specialize.attention.triton_flash import TritonFlash, TritonFlashSeqlen
from sparta.specialize.blocks.attention_lists import attention_lists
from sparta.specialize.seqlen_attention.spec import seqlen_attention_spec
from sparta.testing import attention_reference, check

pytest.importorskip("triton", reason="Triton is not installed on this platform")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no CUDA device")

SMALL, WIDE = AttentionTile(16, 16), AttentionTile(32, 16, tma=1)
LARGER = AttentionTile(16, 16, tma=1, back_queries=64, back_keys=32)  # for gradients
TILES = [SMALL, WIDE, AttentionTile(16, 32), LARGER]


def run(mask, q, k, v, tile=SMALL):
    trained = tile.back_queries > 0
    kernel = TritonFlash().build(attention_spec(mask, q, k, v, backward=trained), {"tile": str(tile)})
    return kernel.run(kernel.pack(mask), q, k, v)


def draw(lead, kv_lead, m, n, e, f, dtype=torch.float32):
    return (torch.randn(*size).to(dtype) for size in ((*lead, m, e), (*kv_lead, n, e), (*kv_lead, n, f)))


def compare(mask, q, k, v, tile=SMALL, *, gradients=True):
    """Compare the result and the gradients with float64."""
    leaves = [x.detach().requires_grad_(gradients) for x in (q, k, v)]
    y = run(mask, *leaves, tile)
    exact = [x.detach().double().requires_grad_(gradients) for x in (q, k, v)]
    expected = attention_reference(*exact, mask)
    terms = max(k.shape[-2], q.shape[-1])
    check(y, expected.detach(), reduction=terms)
    if gradients:
        cotangent = torch.randn_like(expected)
        y.backward(cotangent.to(y.dtype))
        expected.backward(cotangent)
        for leaf, reference in zip(leaves, exact, strict=True):
            check(leaf.grad, reference.grad, reduction=8 * terms, dtype=q.dtype, atol=1e-6)
    return y


@settings(max_examples=12)
@given(
    st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(1, 20), st.integers(1, 20)),
    st.sampled_from(TILES),
    st.sampled_from([0.0, 0.4, 1.0]),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_any_shape_mask_and_dtype(shape, tile, density, dtype):
    mask = torch.rand(shape[:2]) < density
    compare(mask, *draw((1,), (1,), *shape, dtype=dtype), tile, gradients=False)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_gradients_of_heads_with_masks_of_their_own(tile):
    mask = torch.rand(2, 37, 41) < 0.4
    mask[0, :20], mask[1, 16:32, :16] = False, True
    compare(mask, *draw((2,), (1,), 37, 41, 10, 20), tile)


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(40, 40).tril() > 0,
        (torch.ones(40, 40).tril() > 0) & ~(torch.ones(40, 40).tril(-9) > 0) | (torch.arange(40) < 3),
        torch.ones(3, 50) > 0,
        torch.zeros(20, 20) > 0,
        torch.arange(32)[:, None] // 16 == torch.arange(48) // 16 - 1,
    ],
    ids=["causal", "window and global", "all live", "nothing live", "blocks"],
)
@pytest.mark.parametrize("tile", [SMALL, LARGER], ids=str)
def test_patterns(mask, tile):
    compare(mask, *draw((2,), (1,), *mask.shape, 16, 16, dtype=torch.bfloat16), tile)


@pytest.mark.parametrize("queries", [128, 200, 130])  # the last one cannot be described to the copy engine
@pytest.mark.parametrize("back", [(64, 64), (128, 128)])
def test_gradients_in_pieces_of_large_tiles(queries, back):
    tile = AttentionTile(64, 32, tma=1, back_queries=back[0], back_keys=back[1])
    mask = torch.rand(-(-queries // 64), 3).repeat_interleave(64, 0)[:queries].repeat_interleave(64, 1) < 0.6
    mask[70:, 100:] &= torch.rand(queries - 70, 92) < 0.9
    compare(mask, *draw((2,), (1,), queries, 192, 16, 16, dtype=torch.float16), tile)


def test_more_heads_than_start_together_and_not_a_multiple_of_them():
    mask = torch.ones(37, 37, dtype=torch.bool).tril()
    compare(mask, *draw((2, 6), (2, 3), 37, 37, 16, 16))


def test_a_query_that_sees_nothing_is_exactly_0():
    mask = torch.rand(40, 40) < 0.5
    mask[3], mask[16:32] = False, False
    y = compare(mask, *draw((1,), (1,), 40, 40, 16, 16))
    assert not y[:, 3].any()
    assert not y[:, 16:32].any()


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("tile", [SMALL, WIDE, LARGER], ids=str)
def test_nan_that_nobody_sees_stays_out_of_results_and_gradients(tile):
    mask = torch.rand(20, 24) < 0.7
    mask[7], mask[:, 5] = False, False
    q, k, v = draw((1,), (1,), 20, 24, 8, 8)
    q[:, 7], k[:, 5], v[:, 5] = math.nan, math.nan, math.inf
    leaves = [x.requires_grad_() for x in (q, k, v)]
    y = run(mask, *leaves, tile)
    assert y.isfinite().all()
    y.sum().backward()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)
    assert not q.grad[:, 7].any()
    assert not k.grad[:, 5].any()


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_nan_that_is_seen_shows():
    q, k, v = draw((1,), (1,), 16, 16, 8, 8)
    q[:, 3], v[:, 0] = math.nan, math.inf
    y = run(torch.eye(16, dtype=torch.bool) | (torch.arange(16) == 0), q, k, v)
    assert y[:, 3].isnan().all()
    assert not y[:, 5].isfinite().any()


def test_few_queries_of_several_heads_share_their_keys_in_splits():
    """Four heads a kv head are folded into one tile, whose list is split among programs."""
    mask = torch.rand(3, 100) < 0.4
    compare(mask, *draw((1, 8), (1, 2), 3, 100, 16, 10))
    compare(torch.rand(2, 1, 1, 200) < 0.1, *draw((2, 4), (2, 1), 1, 200, 16, 16), gradients=False)


def test_a_kernel_runs_with_other_numbers_of_heads_than_it_was_built_for():
    mask = torch.rand(3, 40) < 0.5
    q, k, v = draw((1, 4), (1, 1), 3, 40, 16, 16)
    kernel = TritonFlash().build(attention_spec(mask, q, k, v), {"tile": str(SMALL)})
    packed = kernel.pack(mask)
    for heads, kv_heads, batch in ((4, 1, 1), (4, 1, 2), (3, 3, 1), (8, 2, 1), (6, 2, 1)):
        q, k, v = draw((batch, heads), (batch, kv_heads), 3, 40, 16, 16)
        check(kernel.run(packed, q, k, v), attention_reference(q, k, v, mask), reduction=40)


@pytest.mark.parametrize(
    ("lead", "kv_lead", "mask_lead"),
    [((), (), ()), ((3,), (3,), (3,)), ((2, 2), (2, 1), (2, 1)), ((2, 1, 2), (2, 1, 2), (1, 2)), ((0, 2), (0, 2), ())],
)
def test_leading_dims(lead, kv_lead, mask_lead):
    mask = torch.rand(*mask_lead, 18, 20) < 0.5
    q, k, v = draw(lead, kv_lead, 18, 20, 8, 8)
    y = run(mask, q, k, v)
    assert y.shape == (*lead, 18, 8)
    if y.numel():
        check(y, attention_reference(q, k, v, mask), reduction=20)


def test_a_mask_with_more_dims_than_the_heads():
    mask = torch.rand(3, 18, 20) < 0.5
    q, k, v = draw((), (), 18, 20, 8, 8)
    check(run(mask, q, k, v), attention_reference(*(x.expand(3, *x.shape) for x in (q, k, v)), mask), reduction=20)


@pytest.mark.parametrize("tile", [SMALL, WIDE], ids=str)
def test_strided_inputs(tile):
    mask = torch.rand(18, 20) < 0.5
    q = torch.randn(1, 18, 2, 16).transpose(1, 2)
    k = torch.randn(1, 2, 16, 20).mT
    v = torch.randn(1, 2, 20, 33)[..., 1:33:2]
    compare(mask, q, k, v, tile, gradients=False)
    compare(mask, q[:, :, :, 1:9], k[:, :, :, 1:9], v.expand(1, 2, 20, 16), tile)


def test_the_same_bits_every_time():
    mask = torch.rand(2, 40, 40) < 0.3
    leaves = [x.requires_grad_() for x in draw((2,), (1,), 40, 40, 16, 16)]
    runs = []
    for _ in range(2):
        y = run(mask, *leaves, WIDE)
        runs.append((y, *torch.autograd.grad(y.square().sum(), leaves)))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("tile", [SMALL, WIDE, LARGER], ids=str)
def test_sequences_of_several_lengths(tile):
    lengths = torch.tensor([0, 16, 33])
    row = (torch.arange(40) < lengths[:, None])[:, None, :, None]
    q, k, v = draw((3, 2), (3, 1), 40, 40, 8, 12)
    leaves = [torch.where(row, x, math.nan).requires_grad_() for x in (q, k, v)]
    kernel = TritonFlashSeqlen().build(seqlen_attention_spec(q, k, v), {"tile": str(tile)})
    y = kernel.run((), *leaves, lengths)
    exact = [torch.where(row, x, 0.0).double().requires_grad_() for x in (q, k, v)]
    expected = attention_reference(*exact, seqlens=lengths)
    check(y, expected.detach(), reduction=40)
    assert not y[~row.expand(y.shape)].any()
    cotangent = torch.randn_like(expected)
    y.backward(torch.where(row, cotangent, math.nan).float())
    expected.backward(cotangent)
    for leaf, reference in zip(leaves, exact, strict=True):
        check(leaf.grad, reference.grad, reduction=200, dtype=torch.float32, atol=1e-6)


def test_the_op_keeps_its_promises_to_pytorch():
    mask = torch.rand(1, 20, 20) < 0.5
    lists = attention_lists(mask, (16, 16))
    inputs = [x.requires_grad_() for x in draw((1, 2), (1, 1), 20, 20, 8, 8)]
    arguments = (
        *inputs,
        list(lists.tensors),
        torch.zeros(2, dtype=torch.int32),
        str(SMALL),
        lists.unclean,
        lists.longest,
    )
    torch.library.opcheck(flash_attention, arguments, test_utils=("test_schema", "test_faketensor"))


def test_torch_compile_takes_it_whole():
    mask = torch.rand(20, 20) < 0.5
    leaves = [x.requires_grad_() for x in draw((1, 2), (1, 1), 20, 20, 8, 8)]
    kernel = TritonFlash().build(attention_spec(mask, *leaves), {"tile": str(SMALL)})
    packed = kernel.pack(mask)
    compiled = torch.compile(lambda *xs: kernel.run(packed, *xs), fullgraph=True, backend="aot_eager")
    y, eager = compiled(*leaves), kernel.run(packed, *leaves)
    assert torch.equal(y, eager)
    for a, b in zip(torch.autograd.grad(y.sum(), leaves), torch.autograd.grad(eager.sum(), leaves), strict=True):
        assert torch.equal(a, b)


# ---------------------------------------------------------------------- choosing

HALF = torch.ones(64, 64).tril() > 0


def spec_of(mask=HALF, e=16, f=16, dtypes=(torch.float16,) * 3, device="cuda", *, trained=False):
    shapes = ((1, 2, mask.shape[-2], e), (1, 2, mask.shape[-1], e), (1, 2, mask.shape[-1], f))
    q, k, v = (torch.zeros(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True))
    spec = attention_spec(mask, q, k, v, backward=trained)
    return type(spec)(spec.op, spec.operands, attributes=spec.attributes, device=device)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (spec_of(device="cpu"), "runs on CUDA"),
        (spec_of(dtypes=(torch.float64,) * 3), "not in fp64"),
        (spec_of(dtypes=(torch.float16, torch.float16, torch.float32)), "all in one of"),
        (spec_of(e=300), "1 to 256"),
        (spec_of(f=0), "1 to 256"),
        (spec_of(), "no CUDA device"),
    ],
)
def test_refusals_name_their_reason(spec, text):
    answer = TritonFlash().supports(spec)
    assert not answer
    assert text in answer.reason


def test_the_default_is_a_point_of_the_space():
    for mask in (HALF, torch.rand(1, 300) < 0.5, torch.rand(30, 300) < 0.5, torch.rand(4, 1, 8) < 0.5):
        for width in (8, 64, 128, 256):
            for dtype in (torch.float16, torch.float32):
                for trained in (False, True):
                    spec = spec_of(mask, width, width, (dtype,) * 3, trained=trained)
                    assert TritonFlash().space(spec)["tile"].includes(TritonFlash().default(spec)["tile"])
    q = torch.zeros(1, 2, 64, 64, dtype=torch.float16)
    spec = seqlen_attention_spec(q, q, q)
    assert TritonFlashSeqlen().space(spec)["tile"].includes(TritonFlashSeqlen().default(spec)["tile"])
    assert "runs on CUDA" in TritonFlashSeqlen().supports(spec).reason


def test_gradients_have_tiles_of_their_own_where_they_are_asked_for():
    tiles = [AttentionTile.parse(tile) for tile in TritonFlash().space(spec_of(trained=True))["tile"].domain.values]
    assert (tiles[0].back_queries, tiles[0].back_keys) == (64, 64)
    assert len({tile.for_gradients() for tile in tiles}) > 1
    assert not any(AttentionTile.parse(t).back_keys for t in TritonFlash().space(spec_of())["tile"].domain.values)


def test_without_triton_building_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match="pip install triton"):
        TritonFlash().build(spec_of(), {"tile": str(SMALL)})
