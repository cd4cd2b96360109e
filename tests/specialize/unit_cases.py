"""One case of a grid: a sparse product or softmax with its gradients, compared with float64, on any device."""

# ruff: noqa: N803, N806, N815 -- A and B are the operands' names

import math
from dataclasses import dataclass, field

import torch

from sparta.specialize.blocks.tiled_matrix import block_places, own_block, to_values, to_whole
from sparta.specialize.implement import implement_named
from sparta.specialize.matmul.spec import Product
from sparta.specialize.softmax.spec import softmax_spec
from sparta.testing import block_mask, check, matmul_reference, softmax_backward_reference, softmax_reference

SPARSE = {"sdd": "A", "dsd": "B", "dds": "C"}


@dataclass(frozen=True)
class ProductCase:
    """A product with one sparse matrix."""

    mode: str
    transpose_A: bool = False
    transpose_B: bool = False
    compressed: bool = False
    biased: bool = False
    dtype: torch.dtype = torch.float32
    sizes: tuple[int, int, int] = (128, 256, 192)
    lead: tuple[int, ...] = (4,)
    mask_lead: tuple[int, ...] = ()
    block: tuple[int, int] = (8, 8)
    sparsity: float = 0.9
    seed: int = 0
    device: str = "cuda"
    transposes: dict[str, bool] = field(init=False, compare=False)

    def __post_init__(self):
        object.__setattr__(self, "transposes", {"transpose_A": self.transpose_A, "transpose_B": self.transpose_B})

    @property
    def shapes(self):
        m, k, n = self.sizes
        return {"A": (k, m) if self.transpose_A else (m, k), "B": (n, k) if self.transpose_B else (k, n), "C": (m, n)}

    def mask(self):
        shape = (*self.mask_lead, *self.shapes[SPARSE[self.mode]])
        return block_mask(shape, self.block, self.sparsity, seed=self.seed, device=self.device)

    def draw(self, *shape):
        return torch.randn(*shape, device=self.device).to(self.dtype)


def product_kernel(implement, params, case, mask, A, B):
    """Return a built kernel and what it packed; parameters None takes the default."""
    product = Product(case.mode, **case.transposes, compressed=case.compressed, block=own_block(mask))
    spec = product.spec(mask, A, B, bias=case.biased)
    found = implement_named(implement, "batch_matmul")
    kernel = found.build(spec, found.default(spec) if params is None else params)
    return kernel, kernel.pack(mask)


def run_product(case, implement="triton-block", params=None, *, gradients=True, mask=None, operands=None):
    """Compare result and gradients with float64; what is pruned holds NaN, and so did the memory of the result."""
    mask = case.mask() if mask is None else mask
    A, B = operands or (case.draw(*case.lead, *case.shapes[name]) for name in "AB")
    bias = case.draw(case.sizes[2]) if case.biased else None
    which, block = SPARSE[case.mode], own_block(mask)
    places = block_places(mask, block).to(mask.device)
    kernel, packed = product_kernel(implement, params, case, mask, A, B)

    def stored(x):
        return to_values(x, places, block) if case.compressed else x

    def whole(x):
        return to_whole(x, places, mask.shape[-2:], block) if case.compressed else x

    given = {"A": A, "B": B}
    if which != "C":
        given[which] = stored(given[which].masked_fill(~mask, math.nan))
    leaves = [x.detach().requires_grad_(gradients) for x in (given["A"], given["B"])]
    shift = None if bias is None else bias.detach().requires_grad_(gradients)
    with torch.no_grad():
        kernel.run(packed, *leaves, shift).fill_(math.nan)  # the next run is given the same memory
    y = kernel.run(packed, *leaves, shift)
    exact = [x.detach().double().requires_grad_(gradients) for x in (A, B)]
    exact_bias = None if bias is None else bias.double().requires_grad_(gradients)
    expected = matmul_reference(*exact, **{f"{which}_mask": mask}, **case.transposes, bias=exact_bias)
    result = whole(y) if which == "C" else y
    assert result.shape == expected.shape
    check(result, expected.detach(), reduction=max(1, case.sizes[1]))
    if which == "C":
        assert not result[~mask.expand(result.shape)].any()
    if gradients:
        slope = torch.randn_like(expected).to(case.dtype)
        y.backward(stored(slope) if which == "C" else slope)
        expected.backward(slope.double())
        terms = 4 * max(1, *case.sizes)
        for name, leaf, reference in zip("AB", leaves, exact, strict=True):
            grad = whole(leaf.grad) if name == which else leaf.grad
            check(grad, reference.grad, reduction=terms, dtype=case.dtype, what=f"the gradient of {name}")
            if name == which:
                assert not grad[~mask.expand(grad.shape)].any()
        if bias is not None:
            many = terms * max(1, math.prod(case.lead))
            check(shift.grad, exact_bias.grad, reduction=many, dtype=case.dtype, what="the gradient of the bias")
    return y


def run_softmax(mask, x, temperature, *, compressed, implement="triton-block", params=None):
    """Compare result and gradient with float64; pruned elements of x may hold anything."""
    block = own_block(mask)
    places = block_places(mask, block).to(mask.device)

    def whole(values):
        return to_whole(values, places, mask.shape[-2:], block) if compressed else values

    leaf = (to_values(x, places, block) if compressed else x).detach().requires_grad_()
    found = implement_named(implement, "softmax")
    spec = softmax_spec(mask, leaf, block=block, compressed=compressed)
    kernel = found.build(spec, found.default(spec) if params is None else params)
    packed, divisor = kernel.pack(mask), torch.full((), temperature, dtype=torch.float64, device=x.device)
    with torch.no_grad():
        kernel.run(packed, leaf, divisor).fill_(math.nan)
    y = kernel.run(packed, leaf, divisor)
    slope = torch.randn(*y.shape, device=x.device).to(y.dtype)
    y.backward(slope)
    expected = softmax_reference(x, mask, temperature)
    result, grad = whole(y.detach()), whole(leaf.grad)
    pruned = ~mask.expand(result.shape)
    assert not result[pruned].any()
    assert not grad[pruned].any()
    check(result, expected, reduction=x.shape[-1])
    exact = softmax_backward_reference(whole(slope), expected, mask, temperature)
    small = 1e-6 if x.dtype == torch.float32 else 1e-3
    check(grad, exact, reduction=8 * x.shape[-1], dtype=x.dtype, atol=small)
