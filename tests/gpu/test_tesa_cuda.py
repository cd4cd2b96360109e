"""On CUDA, patterns, formats and TeSAs give bit for bit what they give on the CPU."""

import pytest
import torch

from sparta import NM, VNM, Block, Channel, Spec, TeSA, Unstructured, detect, testing
from sparta.specialize.linear.cuda_24 import is_two_four
from sparta.tesa import BCSC, BCSR, BCSRC, Bitmap, NMPacked, Packed24, block_cover
from sparta.tesa.select import lowest

PATTERNS = [
    (Unstructured(), 0.9),
    (Block(32, 32), 0.8),
    (Block(16, 64), 0.5),
    (NM(2, 4), None),
    (NM(2, 4), 0.3),
    (NM(4, 32), None),
    (VNM(64, 2, 8), None),
    (Channel(0), 0.25),
    (Channel(1), 0.25),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("pattern", "sparsity"), PATTERNS, ids=str)
def test_projection_and_detection_agree_with_the_cpu(pattern, sparsity, dtype):
    score = torch.rand(250, 510).to(dtype)
    on_cpu, on_gpu = pattern.project(score, sparsity), pattern.project(score.cuda(), sparsity)
    assert on_gpu.is_cuda
    same = (on_cpu == on_gpu.cpu()).float().mean().item()
    # Block and channel scores are means: their rounding may differ between devices, their number of zeros may not.
    assert same == 1.0 if isinstance(pattern, Unstructured | NM) else same > 0.95
    assert int(on_cpu.sum()) == int(on_gpu.sum()) or isinstance(pattern, Block | Channel)
    assert detect(on_gpu).pattern == detect(on_gpu.cpu()).pattern


def test_selection_breaks_ties_by_index_on_both_devices():
    score = torch.randint(0, 4, (1000, 300))
    for count in (0, 1, 77_777, 300_000):
        assert torch.equal(lowest(score.cuda(), count).cpu(), lowest(score, count))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
def test_formats_round_trip(dtype):
    dense = torch.randint(-50, 50, (3, 250, 510), device="cuda").to(dtype)
    two_four = NM(2, 4).project(torch.rand(250, 510, device="cuda"))
    blocks = testing.block_mask((250, 510), (32, 16), 0.7, device="cuda")
    for packed, mask in [
        (BCSR.pack(dense, blocks, block=(32, 16)), blocks),
        (BCSC.pack(dense, blocks, block=(32, 16)), blocks),
        (BCSRC.pack(dense, blocks, block=(32, 16)), blocks),
        (Bitmap.pack(dense, two_four), two_four),
        (NMPacked.pack(dense, two_four, n=2, m=4), two_four),
        (Packed24.pack(dense, two_four), two_four),
    ]:
        expected = torch.where(mask, dense, 0)
        unpacked = packed.unpack()
        assert unpacked.is_cuda
        assert torch.equal(unpacked, expected)
        for axis in (-1, -2):
            testing.check(packed.sum(axis).double(), expected.double().sum(axis), dtype=dtype, reduction=510, atol=1e-2)


def test_a_tesa_is_made_from_and_applied_to_cuda_tensors():
    weight = torch.randn(256, 512, device="cuda")
    tesa = TeSA.from_pattern(Block(64, 64), weight.abs(), 0.5)
    assert not tesa.state.cells.is_cuda
    assert tesa.mask("cuda").is_cuda
    pruned = tesa.apply(weight)
    assert tesa.violations(pruned) == 0
    assert TeSA.from_zeros(pruned).pattern.pattern == Block(64, 64)


def test_a_spec_masks_a_model_on_the_gpu(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 64)).cuda()
    spec = Spec.from_pattern(model, NM(2, 4))
    spec.apply(model)
    spec.save(tmp_path / "spec")
    Spec.load(tmp_path / "spec").check(model)
    spec.check(model.cpu())


def test_a_cover_on_the_gpu_is_the_one_on_the_cpu():
    mask = torch.rand(200, 300) < 0.1
    costs = {(1, 1): 0.01, (16, 16): 1.0, (32, 32): 2.0}
    on_cpu, on_gpu = block_cover(mask, costs), block_cover(mask.cuda(), costs)
    assert on_gpu.cost == pytest.approx(on_cpu.cost)
    weight = torch.randn(200, 300, device="cuda")
    assert torch.equal(sum(on_gpu.split(weight)), torch.where(mask.cuda(), weight, 0.0))


def test_timing_uses_the_device():
    x = torch.randn(2048, 2048, device="cuda")
    comparison = testing.compare({"one": lambda: x @ x, "two": lambda: (x @ x) @ x}, warmup=3, iters=10)
    assert "cuda" in str(comparison.to_dict()).lower()


def test_the_environment_names_the_device():
    machine = testing.environment().to_dict()
    assert torch.cuda.get_device_name() in str(machine)


@pytest.mark.parametrize(("pattern", "sparsity"), PATTERNS, ids=str)
def test_large_masks_are_looked_at_on_the_gpu_and_look_the_same(pattern, sparsity):
    mask = pattern.project(torch.rand(2048, 1024), sparsity)
    torch.zeros(1, device="cuda")
    tesa = TeSA.from_mask(mask)
    large = tesa.state.cells.numel() >= 1 << 20
    assert tesa.soon().cells.is_cuda == large
    assert tesa.pattern.pattern == detect(mask).pattern
    assert tesa.count("live") == int(mask.sum())
    blocks = mask.view(32, 64, 16, 64).any(3).any(1)
    assert torch.equal(tesa.kept_blocks((64, 64)), blocks)
    assert not tesa.state.cells.is_cuda


def test_a_gpu_without_room_leaves_questions_to_the_cpu():
    mask = NM(2, 4).project(torch.rand(8192, 8192))
    torch.zeros(1, device="cuda")
    tesa = TeSA.from_mask(mask)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.0)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            tesa.soon()
        assert tesa.count("live") == int(mask.sum())
        assert tesa.pattern.pattern == NM(2, 4)
        assert torch.equal(tesa.kept_blocks((64, 64)), mask.view(128, 64, 128, 64).any(3).any(1))
        assert is_two_four(tesa)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
