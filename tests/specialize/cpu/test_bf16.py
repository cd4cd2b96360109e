"""Kernels of bf16 against float64: both forms, any shape and mask, ragged edges, NaN and inf; in every build.

Processors without AVX-512 BF16 or AMX compute the same products without their instructions, from the same kernels.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparta.errors import SpartaError
from sparta.measure.machine import probe_cpu
from sparta.specialize.cpu.bf16 import Bf16Tile, PackedBf16
from sparta.specialize.cpu.chain import Product, StepKind, place, step_table
from sparta.specialize.cpu.library import Library, load
from sparta.specialize.cpu.toolchain import chosen_isa
from sparta.specialize.implement import Cause, implement_named
from sparta.specialize.kernel_spec import Epilogue, KernelSpec
from sparta.specialize.linear import cpu_bf16_panel
from sparta.specialize.linear.spec import apply_epilogue, linear_spec
from sparta.specialize.tuning.select import build
from sparta.tesa.attribute import TeSA
from sparta.testing import block_mask, check

TILES = [
    *(Bf16Tile("pairs", 1, 16), Bf16Tile("pairs", 4, 64), Bf16Tile("blocks", 16, 16), Bf16Tile("blocks", 16, 80)),
    *(Bf16Tile("gathered", 16, 16), Bf16Tile("gathered", 16, 112)),
]


def rounded(tensor: Tensor) -> Tensor:
    return tensor.to(torch.bfloat16).double()


def masked(n: int, k: int, density: float, height: int = 1) -> Tensor:
    live = (torch.rand(-(-n // height), k) < density).repeat_interleave(height, 0)[:n]
    return torch.where(live, torch.randn(n, k), 0.0)


def close(found: Tensor, exact: Tensor, scale: Tensor) -> bool:
    """Within the order of sums in float32."""
    return bool(((found.double() - exact).abs() <= 1e-5 * scale + 1e-30).all())


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(TILES),
    st.sampled_from(["portable", None]),
    st.integers(1, 90),
    st.integers(1, 70),
    st.integers(1, 100),
    st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    st.sampled_from([None, "relu", "gelu"]),
    st.integers(0, 1000),
)
def test_any_shape_and_mask(
    tile: Bf16Tile, isa: str | None, m: int, n: int, k: int, density: float, activation: str | None, seed: int
) -> None:
    torch.manual_seed(seed)
    weight, x = masked(n, k, density, 4), torch.randn(m, k)
    bias, residual = torch.randn(n), torch.randn(m, n)
    packed = PackedBf16(weight != 0, tile, isa=isa)
    found = packed(x, packed.pack(weight), bias, activation, residual)
    sums = rounded(x) @ rounded(weight).t() + bias.double()
    done = {"relu": torch.relu, "gelu": torch.nn.functional.gelu}.get(activation or "", lambda each: each)(sums)
    scale = rounded(x).abs() @ rounded(weight).abs().t() + bias.abs().double() + residual.abs().double() + 1
    assert close(found, done + residual.double(), scale)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_threads_and_strides_change_nothing(tile: Bf16Tile) -> None:
    torch.manual_seed(0)
    weight, x = masked(130, 66, 0.3, 4), torch.randn(66, 150).t()
    packed = PackedBf16(weight != 0, tile)
    values = packed.pack(weight)
    alone = packed(x.contiguous(), values, threads=1)
    assert torch.equal(packed(x, values, threads=2), alone)
    assert torch.equal(packed(x.to(torch.bfloat16), values), alone)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_what_is_no_number_stays_so_where_a_live_weight_meets_it(tile: Bf16Tile) -> None:
    weight = torch.zeros(20, 40)
    weight[3, 7], weight[5, 8] = 1.0, -2.0
    x = torch.zeros(3, 40)
    x[0, 7], x[1, 8], x[2, 30] = float("nan"), float("inf"), 3.4e38
    packed = PackedBf16(weight != 0, tile)
    found = packed(x, packed.pack(weight))
    assert found[0, 3].isnan()
    assert found[1, 5] == -float("inf")
    assert found[2].isfinite().all() or tile.form == "blocks"  # a block is multiplied whole: 0 * inf


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_ties_round_to_even(tile: Bf16Tile) -> None:
    bits = torch.tensor([0x3F808000, 0x3F818000, 0x3F80FFFF, 0x7F7FFFFF, 0x00000001], dtype=torch.int32)
    x = torch.diag(bits.view(torch.float32))
    packed = PackedBf16(torch.ones(1, 5, dtype=torch.bool), tile)
    found = packed(x, packed.pack(torch.ones(1, 5)))[:, 0]
    expected = bits.view(torch.float32).to(torch.bfloat16).float()
    assert torch.equal(found[:3], expected[:3])
    assert found[3].isnan() or found[3].isinf()  # beyond the largest bf16, beside zeros
    assert found[4] == 0


def chained(products: list[Product], x: Tensor) -> Tensor:
    """Run two products, the first of which hands over a panel, as one chain."""
    first, second = products
    memory = torch.zeros(first.panel_bytes(len(x), first.outputs) + 64, dtype=torch.uint8)
    shared = torch.zeros(first.panel_bytes(len(x), first.inputs), dtype=torch.uint8)
    y = torch.empty(len(x), second.outputs)
    steps = [
        (first.pack(len(x), x.stride(0)), [place(0, 0), place(3, 0)]),
        (first.step(len(x), 0, "panel", to_panel=True), [place(3, 0), place(1, 0)]),
        (second.step(len(x), 0, "panel"), [place(1, 0), place(2, 0)]),
    ]
    table, alive = step_table(steps)
    addresses = torch.tensor([x.data_ptr(), memory.data_ptr(), y.data_ptr(), shared.data_ptr()])
    code = load().handle.sparta_run_chain(table, len(steps), addresses.numpy().tobytes(), 2)
    assert code == 0
    assert alive
    return y


@pytest.mark.parametrize("kinds", [("pairs:4:16", "blocks:16:16"), ("blocks:16:32", "pairs:1:32")])
@pytest.mark.parametrize("middle", [1, 31, 70])
def test_products_hand_over_panels(kinds: tuple[str, str], middle: int) -> None:
    torch.manual_seed(middle)
    one, two, x = masked(middle, 37, 0.5, 4), masked(11, middle, 0.5), torch.randn(41, 37)
    bias, products = torch.randn(middle), []
    for text, weight, shift, activation in zip(kinds, (one, two), (bias, None), ("relu", None), strict=True):
        packed = PackedBf16(weight != 0, Bf16Tile.parse(text))
        product = packed.product(packed.pack(weight), shift, activation)
        assert product is not None
        assert product.kind is StepKind.BF16
        products.append(product)
    found = chained(products, x)
    between = rounded(torch.relu(rounded(x) @ rounded(one).t() + bias.double()).float())
    exact, scale = between @ rounded(two).t(), between.abs() @ rounded(two).abs().t()
    # Sums that lie near the middle of two bf16 may be rounded to either.
    assert bool(((found.double() - exact).abs() <= 2**-8 * scale + 1e-6).all())
    assert close(found, exact, 1e3 * scale + 1)


@pytest.mark.parametrize("inputs", [384, 416, 900])
def test_many_channels_are_summed_in_chunks(inputs: int) -> None:
    torch.manual_seed(inputs)
    weight, x = masked(48, inputs, 0.4, 16), torch.randn(70, inputs)
    weight[16:32] = weight[:16]  # two groups with the same blocks, and one with others
    weight[32:, 64:128] = 0
    packed = PackedBf16(weight != 0, Bf16Tile("blocks", 16, 48))
    exact, scale = rounded(x) @ rounded(weight).t(), rounded(x).abs() @ rounded(weight).abs().t()
    assert close(packed(x, packed.pack(weight)), exact, scale)


def test_pairs_store_nothing_that_is_not_live() -> None:
    mask = torch.zeros(4, 64, dtype=torch.bool)
    mask[:, [0, 2, 4, 7, 9, 11]] = True
    packed = PackedBf16(mask, Bf16Tile("pairs", 4, 16))
    assert len(packed.pack(torch.ones(4, 64))) == 4 * 6


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Bf16Tile("pear", 4), "pairs"),
        (lambda: Bf16Tile("pairs", 3), "one of"),
        (lambda: Bf16Tile("pairs", 4, 20), "multiple of 16"),
        (lambda: Bf16Tile.parse("pairs"), "form:rows:tokens"),
        (lambda: PackedBf16(torch.ones(2, 2), TILES[0]), "bool"),
        (lambda: PackedBf16(torch.ones(2, 2, dtype=torch.bool), TILES[0]).pack(torch.ones(3, 2)), "as when packed"),
        (
            lambda: PackedBf16(torch.ones(2, 2, dtype=torch.bool), TILES[0])(torch.ones(1, 2), torch.ones(3)),
            "what pack",
        ),
        (
            lambda: PackedBf16(torch.ones(2, 2, dtype=torch.bool), TILES[0])(torch.ones(1, 3), torch.ones(3)),
            "float dtype",
        ),
    ],
)
def test_bad_arguments_say_what_is_allowed(make: object, words: str) -> None:
    with pytest.raises(SpartaError, match=words):
        make()  # type: ignore[operator]


def test_the_units_are_those_of_the_processor() -> None:
    units = load().bf16_units
    assert units <= {"pairs", "blocks"}
    if chosen_isa(None) != "avx512":
        assert not units


def _spec(
    rows: int, dtype: torch.dtype = torch.bfloat16, epilogue: Epilogue | None = None, sparsity: float = 0.6
) -> KernelSpec:
    return linear_spec(TeSA.from_mask(block_mask((64, 96), (4, 1), sparsity, seed=0)), rows, dtype, epilogue=epilogue)


def test_the_implement_says_what_it_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    implement = implement_named("cpu-bf16-panel", "linear")
    assert implement.supports(_spec(64, torch.float32)).cause is Cause.DTYPE
    assert implement.supports(_spec(2)).cause is Cause.SHAPE
    monkeypatch.setattr(cpu_bf16_panel, "_FLAGS", frozenset())
    refused = implement.supports(_spec(64))
    assert refused.cause is Cause.CAPABILITY
    assert "AMX" in refused.reason


@pytest.mark.parametrize(
    ("units", "sparsity", "forms"),
    [
        ({"pairs"}, 0.6, ["pairs"]),
        ({"blocks"}, 0.6, ["blocks"]),
        ({"pairs", "blocks"}, 0.9, ["gathered", "blocks", "pairs"]),
    ],
    ids=["pairs", "blocks", "both"],
)
def test_the_implement_computes_a_layer_of_a_bf16_model(
    monkeypatch: pytest.MonkeyPatch, units: set[str], sparsity: float, forms: list[str]
) -> None:
    monkeypatch.setattr(cpu_bf16_panel, "_FLAGS", frozenset(probe_cpu().vector_isa))
    monkeypatch.setattr(Library, "bf16_units", units)
    spec = _spec(70, epilogue=Epilogue(bias=True, activation="gelu", residual=True), sparsity=sparsity)
    implement = implement_named("cpu-bf16-panel", "linear")
    assert implement.supports(spec)
    torch.manual_seed(0)
    weight = torch.where(spec["weight"].mask("cpu"), torch.randn(64, 96), 0).bfloat16()
    x, bias, residual = torch.randn(70, 96).bfloat16(), torch.randn(64).bfloat16(), torch.randn(70, 64).bfloat16()
    exact = x.double() @ weight.double().t() + bias.double()
    truth = apply_epilogue(exact, spec.epilogue, residual.double())
    tiles = implement.tiles(spec)  # type: ignore[attr-defined]
    assert list(dict.fromkeys(str(tile).split(":")[0] for tile in tiles)) == forms
    for tile in tiles:
        kernel = build(spec, {"_name": "cpu-bf16-panel", "tile": str(tile)})
        y = kernel.run(kernel.pack(weight), x, bias, residual)
        assert y.dtype == torch.bfloat16
        check(y, truth, reduction=96)
