"""What does a call of a sparse layer cost the host? Microseconds a call, beside `functional.linear`.

Run with ``python benchmarks/gpu/host.py``. The layers are so small that the GPU is done before the host comes back;
rounds of calls take turns, and the median round counts. The kernels in CUDA C++ are started by both bindings, the one
at run time by ctypes and the compiled operator; these take turns too, for the speed of a host changes within seconds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[1]))

from record import save
from sparta.nn import SparseLinear
from sparta.specialize.cuda.extension import load_extension, without_extension
from sparta.specialize.implement import implement_named
from sparta.specialize.linear.spec import linear_spec
from sparta.tables import table
from sparta.tesa.attribute import TeSA
from sparta.testing import block_mask

DTYPE = torch.bfloat16
_SIZE = 1024
_ROUNDS, _CALLS = 40, 50
_OPERATOR = "cuda-24, compiled operator"


def two_four() -> Tensor:
    """Return a 2:4 mask."""
    return torch.tensor([True, False, False, True]).repeat(_SIZE, _SIZE // 4)


def layer_of(name: str, tokens: int, mask: Tensor) -> Callable[[], Tensor]:
    """Return the call of a layer that runs one implement with its best guess."""
    x = torch.randn(tokens, _SIZE, device="cuda", dtype=DTYPE)
    layer = SparseLinear(nn.Linear(_SIZE, _SIZE, bias=False).cuda().to(DTYPE), weight_mask=mask).eval()
    spec = linear_spec(TeSA.from_mask(mask), tokens, DTYPE, device="cuda")
    layer.build({"_name": name, **implement_named(name, "linear").default(spec)}, x)
    return lambda: layer(x)


def costs(calls: dict[str, Callable[[], Tensor]]) -> dict[str, float]:
    """Return the median host microseconds of each call."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    with torch.no_grad():
        for _ in range(_ROUNDS):
            for name, call in calls.items():
                with nullcontext() if name == _OPERATOR else without_extension():
                    torch.cuda.synchronize()
                    begin = time.perf_counter()
                    for _ in range(_CALLS):
                        call()
                    samples[name].append((time.perf_counter() - begin) * 1e6 / _CALLS)
    return {name: statistics.median(each) for name, each in samples.items()}


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="folder of the results")
    options = parser.parse_args()
    dense, x = nn.Linear(_SIZE, _SIZE, bias=False).cuda().to(DTYPE), torch.randn(16, _SIZE, device="cuda", dtype=DTYPE)
    load_extension()
    few = layer_of("cuda-24", 16, two_four())
    calls: dict[str, Callable[[], Tensor]] = {
        "functional.linear": lambda: functional.linear(x, dense.weight),
        "nn.Linear": lambda: dense(x),
        "triton-block": layer_of("triton-block", 16, block_mask((_SIZE, _SIZE), (64, 64), 0.9, seed=0)),
        "cuda-24": few,
        _OPERATOR: few,
        "cusparselt": layer_of("cusparselt", 128, two_four()),
    }
    found = costs(calls)
    plain = found["functional.linear"]
    print(
        table(
            ["call", "us", "above functional.linear"],
            [[name, f"{us:.1f}", f"{us - plain:+.1f}"] for name, us in found.items()],
        )
    )
    print(save("host_cost", torch.cuda.get_device_name(), {"unit": "us a call", "host_us": found}, options.out))


if __name__ == "__main__":
    main()
