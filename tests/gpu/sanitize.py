"""Run small cases of every CUDA kernel under NVIDIA's compute-sanitizer: ``python tests/gpu/sanitize.py``.

Arguments go to the sanitizer, such as ``--tool racecheck``; without any it checks memory accesses. The one idea to
know: a checker that is not really at work would pass everything, so a kernel that writes out of bounds is tried first
and must be caught.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = (
    "test_attention.py::test_ragged_shapes",
    "test_attention.py::test_few_queries_over_many_keys",
    "test_attention.py::test_sequences_of_several_lengths",
    "test_batch_matmul.py::test_ragged_shapes",
    "test_batch_matmul.py::test_softmax_of_any_shape",
    "test_bitmap.py::test_every_tile_is_right",
    "test_block_linear.py::test_ragged_shapes_and_densities",
    "test_ragged.py::test_any_shape",
    "test_threshold.py::test_it_is_the_dense_layer_of_the_thresholded_input",
    "test_two_four.py::test_every_tile_of_the_streaming_kernel_is_right",
)
SMALL = "(bfloat16 or few_queries) and not 4096 and not 3072 and not 1024"
FAULT = """
import ctypes, torch
from sparta.specialize.cuda.nvrtc import compile_cuda, load_function

class Call(ctypes.Structure):
    _fields_ = (("cells", ctypes.c_void_p), ("place", ctypes.c_longlong))

source = '''struct Call { float* cells; long long place; };
extern "C" __global__ void fault(Call call) { call.cells[call.place] = 1.f; }'''
cells = torch.zeros(16, device="cuda")
code = compile_cuda(source, {}, torch.cuda.get_device_capability())
load_function(code, "fault", 1, 0, cells.device).launch((1, 1), Call(cells.data_ptr(), 1 << 22), cells.device)
torch.cuda.synchronize()
"""


def main() -> int:
    """Try the fault, then the tests; return what the sanitizer returned."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        raise SystemExit("compute-sanitizer was not found; it comes with the CUDA toolkit")
    command = [sanitizer, "--error-exitcode", "99"]
    python_path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    # With PyTorch's cache of memory, what lies behind a tensor would still be its process's own.
    variables = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": python_path}
    tried = subprocess.run(
        [*command, sys.executable, "-c", FAULT], env=variables, cwd=ROOT, capture_output=True, text=True, check=False
    )
    if "Invalid __global__ write" not in tried.stdout:
        raise SystemExit(f"a write out of bounds was not caught:\n{tried.stdout}\n{tried.stderr}")
    tests = [str(Path("tests", "gpu", name)) for name in TESTS]
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", SMALL, *tests]
    return subprocess.run([*command, *sys.argv[1:], *pytest], env=variables, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
