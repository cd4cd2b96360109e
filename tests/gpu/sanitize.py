"""Run small cases of every CUDA kernel under NVIDIA's compute-sanitizer: ``python tests/gpu/sanitize.py``.

Arguments go to the sanitizer; without any it checks memory accesses. ``--tool racecheck`` looks at memory that threads
share by hand, so it runs the groups of CUDA C++ alone: Triton places its own barriers. ``--only TEXT`` before them
runs the groups in whose names the regular expression is found. Each group runs in a process of its own, several at a
time, and is reported when it ends. A checker that is not really at work would pass everything, so a kernel with a fault
of the kind that is looked for is tried first and must be caught, and a group whose choice fits no test is a failure.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Tests, and which of their cases, for each process: small ones, for every access of every thread is checked.
GROUPS = {
    "test_attention.py::test_ragged_shapes": ("bfloat16",),
    "test_all_keys.py::test_it_is_attention": ("bfloat16 and not 512",),
    "test_attention.py::test_few_queries_over_many_keys": ("",),
    "test_attention.py::test_sequences_of_several_lengths": ("bfloat16",),
    "test_banks.py::test_every_layout_in_8_bits": ("17-5", "300-700 and fp8", "300-700 and int8"),
    "test_banks.py::test_every_layout_in_16_bits": ("bfloat16 and 100-1300",),
    "test_batch_matmul.py::test_ragged_shapes": ("bfloat16", "float32 and sizes0"),
    "test_batch_matmul.py::test_softmax_of_any_shape": ("bfloat16",),
    "test_bitmap.py::test_every_tile_is_right": ("64-256 or 17-5 or 77-520 or 100-300 or 33-136",),
    "test_block_training.py::test_packing_by_a_kernel": ("",),
    "test_block_training.py::test_the_gradient_of_kept_blocks": ("dtype1 and (shape1 or shape2)",),
    "test_block_training.py::test_the_gradient_by_warpgroups": ("bfloat16 and 304x200",),
    "test_block_linear.py::test_ragged_shapes_and_densities": ("bfloat16 and not 4096 and not 3072 and not 1024",),
    "test_block_few.py::test_every_tile_is_right": ("bfloat16 and (3-100 or 17-77)",),
    "test_block_few.py::test_every_tile_is_right_in_8_bits": ("bfloat16 and (3-100 or 17-77)",),
    "test_cuda_block.py::test_every_tile_is_right": ("bfloat16 and (300-136 or 277-1000)",),
    "test_cuda_block.py::test_every_tile_is_right_in_fp8": ("300-136",),
    "test_lanes.py::test_every_layout_is_right": ("8-2", "16-1"),
    "test_one_query.py::test_it_is_attention": ("bfloat16 and not 40000",),
    "test_few_tokens.py::test_walking_over_live_values": ("bfloat16 and (17-5 or 100-1300 or 300-700)",),
    "test_few_tokens.py::test_two_four_beside_a_resident_input": ("bfloat16 and (17-2048 or 100-1304)",),
    "test_ragged.py::test_any_shape": ("bfloat16",),
    "test_scaled.py::test_blocks": ("272-528 or 300-400",),
    "test_scaled.py::test_tokens_are_rounded_as_defined": ("",),
    "test_scaled.py::test_two_four_beside_a_resident_input": ("17-2048 or 100-1300",),
    "test_scaled.py::test_two_four_streamed": ("17-5 or 77-520",),
    "test_scaled.py::test_unstructured": ("17-5 or 100-1300 or 300-700",),
    "test_settled.py::test_layers_in_a_row": (
        "resident",
        "banks or gather",
        "lanes or few",
        "24-matrix",
        "24-twice",
        "block-b or block-fp8",
    ),
    "test_threshold.py::test_it_is_the_dense_layer_of_the_thresholded_input": ("17-5 or 300-1000 or 77-4100",),
    "test_twice.py::test_every_layout_is_right": ("8-", "16-"),
    "test_two_four_matrix.py::test_every_tile_is_right": ("bfloat16 and (17-8 or 300-136 or 77-1000)",),
    "test_two_four_matrix.py::test_every_tile_is_right_in_fp8": ("17-8 or 300-136",),
    "test_two_four_matrix.py::test_packing_by_a_kernel_is_what_the_layout_says": ("",),
    "test_two_four_matrix.py::test_a_weight_and_its_transpose_are_packed_together": ("72-200 or 300-136",),
    "test_two_four_matrix.py::test_a_mask_that_is_two_four_along_both_axes_has_sparse_gradients": ("",),
    "test_two_four.py::test_every_tile_of_the_streaming_kernel_is_right": ("not 4096 and not 1024",),
}
# Other cases of the same layouts for racecheck, which takes seconds for a launch where threads share much.
RACES = {
    "test_banks.py::test_every_layout_in_8_bits": tuple(
        f"300-700-{tokens} and live0.3 and {format}" for tokens in (1, 2, 4) for format in ("fp8", "int8")
    ),
    "test_block_training.py::test_the_gradient_by_warpgroups": ("bfloat16 and 304x200 and masked",),
    "test_scaled.py::test_two_four_streamed": tuple(
        f"(17-5 or 77-520) and {format}" for format in ("fp8", "int8", "int4")
    ),
    "test_threshold.py::test_it_is_the_dense_layer_of_the_thresholded_input": ("17-5 and 0.7", "300-1000 and 0.7"),
    "test_two_four_matrix.py::test_every_tile_is_right": tuple(
        f"bfloat16 and 300-136 and tiles{quarter}" for quarter in range(4)
    ),
    "test_two_four.py::test_every_tile_of_the_streaming_kernel_is_right": (
        "bfloat16 and (64-256 or 77-520 or 48-640)",
        "bfloat16 and (17-5 or 100-300 or 33-130 or 1000-1000)",
    ),
}
# Groups of kernels in Triton, whose compiler shares memory.
TRITON = (
    "test_all_keys",
    "test_attention",
    "test_batch_matmul",
    "test_block_linear",
    "test_block_training.py::test_packing",
    "test_block_training.py::test_the_gradient_of",
    "test_one_query",
    "test_ragged",
    "test_scaled.py::test_blocks",
    "test_tokens",
)
# Kernels of PyTorch and its libraries: not ours to check, and most of the time.
OTHERS = ("kns=at6native", "kns=cub", "regex=nvjet|cutlass|cublas|xmma|gemv|splitK|gemmSN|gemmk1|dgemm|sgemm")
AT_ONCE = 10
FAULT = """
import ctypes, torch
from sparta.specialize.cuda.nvrtc import compile_cuda, load_function

class Call(ctypes.Structure):
    _fields_ = (("cells", ctypes.c_void_p), ("place", ctypes.c_longlong))

source = '''struct Call { float* cells; long long place; };
extern "C" __global__ void fault(Call call) {
    __shared__ float shared[64];
    shared[threadIdx.x] = call.cells[threadIdx.x & 15];  // which others read with no barrier between
    call.cells[call.place + (threadIdx.x & 15)] = shared[63 - threadIdx.x];
}'''
cells = torch.zeros(32, device="cuda")
code = compile_cuda(source, {}, {}, torch.cuda.get_device_capability())
load_function(code, "fault", 64, 0, cells.device).launch((1, 1), Call(cells.data_ptr(), PLACE), cells.device)
torch.cuda.synchronize()
"""
CAUGHT = {"memcheck": "Invalid __global__ write", "racecheck": "hazard"}


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command in the repository, without PyTorch's cache of memory."""
    python_path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    # With the cache, what lies behind a tensor would still be its process's own.
    variables = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": python_path}
    return subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, check=False)


def try_fault(command: list[str], tool: str) -> None:
    """Raise SystemExit unless a kernel with a fault of the tool's kind is caught."""
    place = 1 << 22 if tool == "memcheck" else 16
    tried = run([*command, sys.executable, "-c", FAULT.replace("PLACE", str(place))])
    if CAUGHT[tool] not in tried.stdout:
        raise SystemExit(f"{tool} did not catch a planted fault:\n{tried.stdout}\n{tried.stderr}")
    print(f"{tool} catches a planted fault", flush=True)


def main() -> int:
    """Try the fault, then the groups; return how many of them are not clean."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        raise SystemExit("compute-sanitizer was not found; it comes with the CUDA toolkit")
    given, wanted = sys.argv[1:], ""
    if given[:1] == ["--only"]:
        wanted, given = given[1], given[2:]
    tool = "racecheck" if "racecheck" in given else "memcheck"
    # What calls of the driver return, we look at ourselves: asking for a parameter too many is how they are counted.
    command = [sanitizer, "--error-exitcode", "99", "--report-api-errors", "no", *given]
    try_fault(command, tool)
    command += [part for other in OTHERS for part in ("--kernel-name-exclude", other)]
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    table = GROUPS | RACES if tool == "racecheck" else GROUPS
    chosen = [(test, cases) for test, several in table.items() for cases in several if re.search(wanted, test)]
    if tool == "racecheck":
        chosen = [(test, cases) for test, cases in chosen if not any(name in test for name in TRITON)]
    begin, failed, passed = time.monotonic(), 0, 0
    with ThreadPoolExecutor(AT_ONCE) as pool:
        groups = {
            pool.submit(run, [*command, *pytest, "-k", cases, str(Path("tests", "gpu", test))]): f"{test} {cases}"
            for test, cases in chosen
        }
        for done in as_completed(groups):
            found = done.result()
            failed += found.returncode != 0
            verdict = "clean" if found.returncode == 0 else f"NOT CLEAN ({found.returncode})"
            print(f"{time.monotonic() - begin:5.0f} s  {verdict}  {groups[done]}", flush=True)
            lines = found.stdout.splitlines()
            print("\n".join(lines[-2:] if found.returncode == 0 else [*lines[-60:], found.stderr[-2000:]]), flush=True)
            passed += sum(int(number) for number in re.findall(r"^(\d+) passed", found.stdout, re.MULTILINE))
    print(f"{tool}: {len(groups)} groups, {passed} tests passed, {failed} groups not clean", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
