"""The ragged kernels, run by Triton's interpreter, send each token through its own experts and no other."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparta.errors import MissingPackageError, ValueRangeError
from sparta.specialize.moe.op import ragged_linear, routes
from sparta.specialize.moe.spec import moe_spec
from sparta.specialize.moe.tile import RaggedTile
from sparta.specialize.moe.triton_ragged import TritonRagged
from sparta.testing import check, moe_reference

pytest.importorskip("triton", reason="Triton is not installed on this platform")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no CUDA device")

PLAIN = RaggedTile(16, 16, 16)
SPAN = RaggedTile(32, 16, 16, tma=1, halves=1, ctas=0)
ORDERED = RaggedTile(32, 32, 16, tma=1, halves=1, ordered=1)
TILES = [PLAIN, SPAN, ORDERED]
K, N = 48, 48


def experts_of(count, bias=(True,), n=N, k=K, dtype=torch.float32):
    """Return weight and bias of each expert in turn."""
    made = []
    for number in range(count):
        made += [torch.randn(n, k).to(dtype), torch.randn(n).to(dtype) if bias[number % len(bias)] else None]
    return made


def run(tile, tokens, ids, gates, parameters):
    kernel = TritonRagged().build(moe_spec(tokens, ids, parameters[::2]), {"tile": str(tile)})
    return kernel.run(kernel.pack(tokens), tokens, ids, gates, *parameters)


def compare(tile, tokens, ids, gates, parameters):
    """Compare the result and all gradients with float64."""
    leaves = [None if x is None else x.detach().requires_grad_() for x in (tokens, gates, *parameters)]
    y = run(tile, leaves[0], ids, leaves[1], leaves[2:])
    exact = [None if x is None else x.detach().double().requires_grad_() for x in leaves]
    zero = torch.zeros(y.shape[1], dtype=torch.float64)
    biases = [zero if bias is None else bias for bias in exact[3::2]]
    expected = moe_reference(exact[0], ids, exact[2::2], biases, exact[1])
    check(y, expected.detach(), reduction=4 * tokens.shape[1]) if y.numel() else None
    cotangent = torch.randn_like(expected)
    y.backward(cotangent.to(y.dtype))
    expected.backward(cotangent)
    for leaf, reference in zip(leaves, exact, strict=True):
        if leaf is not None and leaf.numel():
            right = torch.zeros_like(reference) if reference.grad is None else reference.grad
            check(leaf.grad, right, reduction=1000, dtype=tokens.dtype, atol=1e-6)


@settings(max_examples=25)
@given(st.integers(0, 300), st.integers(1, 40), st.integers(1, 3))
def test_routes_are_a_stable_sort(rows, experts, visits):
    ids = torch.randint(0, experts, (rows, visits))
    found = routes(ids, experts)
    assert torch.equal(found.order[: ids.numel()].long(), ids.flatten().argsort(stable=True))
    ends = found.ends.reshape(experts, found.blocks)[:, -1]
    assert torch.equal(ends.long(), torch.bincount(ids.flatten(), minlength=experts).cumsum(0))


@settings(max_examples=8)
@given(
    st.tuples(st.integers(0, 60), st.integers(1, 40), st.integers(1, 40), st.integers(2, 5), st.integers(1, 3)),
    st.sampled_from(TILES),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    st.booleans(),
)
def test_any_shape_and_dtype(shape, tile, dtype, gated):
    count, k, n, experts, visits = shape
    tokens, ids = torch.randn(count, k).to(dtype), torch.randint(0, experts, (count, visits))
    gates = torch.rand(count, visits) if gated else None
    with torch.no_grad():
        parameters = experts_of(experts, n=n, k=k, dtype=dtype)
        y = run(tile, tokens, ids, gates, parameters)
    assert y.dtype == dtype
    check(y, moe_reference(tokens, ids, parameters[::2], parameters[1::2], gates), reduction=4 * k) if count else None


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_gradients(tile):
    compare(tile, torch.randn(41, K), torch.randint(0, 3, (41, 2)), torch.rand(41, 2), experts_of(3))


@pytest.mark.parametrize("bias", [(False,), (True, False)], ids=["no bias", "mixed"])
def test_gradients_without_gates(bias):
    parameters = experts_of(3, bias, dtype=torch.bfloat16)
    compare(ORDERED, torch.randn(20, K).bfloat16(), torch.randint(0, 3, (20, 1)), None, parameters)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_all_at_one_expert_none_at_others_and_one_named_twice(tile):
    tokens, parameters = torch.randn(40, K), experts_of(4)
    for ids in (torch.full((40, 1), 2), torch.full((40, 2), 3)):
        with torch.no_grad():
            y = run(tile, tokens, ids, None, parameters)
        check(y, moe_reference(tokens, ids, parameters[::2], parameters[1::2]), reduction=4 * K)
    compare(tile, tokens, torch.full((40, 1), 1), torch.rand(40, 1), parameters)


def test_no_tokens_have_gradients_of_0():
    compare(PLAIN, torch.randn(0, K), torch.zeros(0, 2, dtype=torch.int64), torch.rand(0, 2), experts_of(2))


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_nan_stays_with_its_token_and_its_expert(tile):
    tokens, parameters = torch.randn(40, K), experts_of(3)
    tokens[5, 1] = math.nan
    parameters[4] = torch.full((N, K), math.inf)
    ids = torch.arange(40)[:, None] % 3
    with torch.no_grad():
        y = run(tile, tokens, ids, None, parameters)
    wrong = ~y.isfinite().all(1)
    assert torch.equal(wrong.nonzero().flatten(), torch.cat([torch.tensor([5]), torch.arange(2, 40, 3)]).unique())


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_strided_inputs(tile):
    tokens = torch.randn(K, 40).t()
    ids, gates = torch.randint(0, 3, (2, 40)).t(), torch.rand(2, 40).t()
    parameters = [x.t().contiguous().t() if x is not None and x.dim() == 2 else x for x in experts_of(3)]
    compare(tile, tokens, ids, gates, parameters)
    with torch.no_grad():
        odd = torch.randn(40, K + 1)[:, 1:]
        y = run(tile, odd, ids, gates, parameters)
    check(y, moe_reference(odd, ids, parameters[::2], parameters[1::2], gates), reduction=4 * K)


def test_the_same_bits_every_time():
    tokens, ids, gates, parameters = torch.randn(40, K), torch.randint(0, 3, (40, 2)), torch.rand(40, 2), experts_of(3)
    leaves = [x.requires_grad_() for x in (tokens, gates, *parameters)]
    runs = []
    for _ in range(2):
        y = run(ORDERED, tokens, ids, gates, parameters)
        runs.append((y, *torch.autograd.grad(y.square().sum(), leaves)))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_the_op_keeps_its_promises_to_pytorch():
    parameters = [x.requires_grad_() for x in experts_of(2)]
    arguments = (torch.randn(9, K), torch.randint(0, 2, (9, 2)), torch.rand(9, 2), parameters[::2], parameters[1::2], str(PLAIN))  # fmt: skip  # noqa: E501
    torch.library.opcheck(ragged_linear, arguments, test_utils=("test_schema", "test_faketensor"))


def test_torch_compile_takes_it_whole():
    tokens, ids, parameters = torch.randn(9, K).requires_grad_(), torch.randint(0, 2, (9, 2)), experts_of(2)
    kernel = TritonRagged().build(moe_spec(tokens, ids, parameters[::2]), {"tile": str(PLAIN)})
    compiled = torch.compile(lambda x: kernel.run((), x, ids, None, *parameters), fullgraph=True, backend="aot_eager")
    y, eager = compiled(tokens), kernel.run((), tokens, ids, None, *parameters)
    assert torch.equal(y, eager)
    assert torch.equal(*(torch.autograd.grad(x.sum(), tokens)[0] for x in (y, eager)))


def test_tokens_in_another_dtype_say_what_is_allowed():
    with pytest.raises(ValueRangeError, match="as the weights"):
        run(PLAIN, torch.randn(3, K).half(), torch.zeros(3, 1, dtype=torch.int64), None, experts_of(2))


WRONG = ["rows=24", "columns=8", "depth=1", "warps=3", "tma=2", "halves=2", "ordered=2", "stages=0", "size=3"]
WRONG += ["rows=16,halves=1", "rows"]


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_tile_says_what_is_allowed(text):
    with pytest.raises(ValueRangeError):
        RaggedTile.parse(text)


# ---------------------------------------------------------------------- choosing


def spec_of(experts=4, tokens=torch.float16, weights=torch.float16, device="cuda", count=8):
    spec = moe_spec(
        torch.zeros(count, K, dtype=tokens),
        torch.zeros(count, 2, dtype=torch.int64),
        [torch.zeros(N, K, dtype=weights)] * experts,
    )
    return type(spec)(spec.op, spec.operands, attributes=spec.attributes, device=device)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (spec_of(device="cpu"), "runs on CUDA"),
        (spec_of(tokens=torch.float64, weights=torch.float64), "fp64"),
        (spec_of(weights=torch.float32), "both in one of"),
        (spec_of(experts=1), "2 to 1024 experts"),
        (spec_of(), "no CUDA device"),
    ],
)
def test_refusals_name_their_reason(spec, text):
    answer = TritonRagged().supports(spec)
    assert not answer
    assert text in answer.reason


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("count", [1, 60, 5000])
def test_the_default_is_a_point_of_the_space(count, dtype):
    spec = spec_of(tokens=dtype, weights=dtype, count=count)
    assert TritonRagged().space(spec)["tile"].includes(TritonRagged().default(spec)["tile"])


def test_without_triton_building_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match="pip install triton"):
        TritonRagged().build(spec_of(), {"tile": str(PLAIN)})
