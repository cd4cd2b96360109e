"""Run the tests of the CPU kernels under the address and undefined-behaviour sanitizers: ``python tests/sanitize.py``.

Arguments are pytest's; unless they name files, all tests of the kernels run. A sanitizer that is not really at work
would pass everything, so a kernel that reads out of bounds is tried first and must be caught. The libraries are
compiled before the tests, since that takes minutes for each. Random tests draw fewer examples than elsewhere: kernels
are many times slower here, and faults of memory show at edges that few reach.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXAMPLES = 10  # of a random test
KERNELS = (
    "linear/test_cpu.py",
    "conv/test_cpu.py",
    "conv/test_shares.py",
    "conv/test_phases.py",
    "int8_linear/test_cpu.py",
    "conv/test_cpu_dense.py",
    "conv/test_int8.py",
    "cpu/test_short.py",
    "cpu/test_short_bytes.py",
    "cpu/test_bf16.py",
    "cpu/test_attention_bf16.py",
    "linear/test_cpu_generated.py",
    "cpu/test_pool.py",
)
# A masked input runs the kernels of linear layers with the roles of input and weight exchanged; compiling graphs needs
# a compiler of its own, which sanitizers stop.
SELECTION = (
    *(str(Path("tests", "specialize", name)) for name in KERNELS),
    str(Path("tests", "nn", "test_masked_linear.py")),
    str(Path("tests", "compiler", "run", "test_chain.py")),
    str(Path("tests", "compiler", "run", "test_chain_memory.py")),
    str(Path("tests", "compiler", "run", "test_chain_places.py")),
    str(Path("tests", "compiler", "run", "test_chain_gaps.py")),
    str(Path("tests", "compiler", "run", "test_chain_side_by_side.py")),
    *("-k", "not torch_compile"),
)
FAULTS = {
    "AddressSanitizer": "int* volatile cells = new int[n]; int read = cells[n]; delete[] cells; return read;",
    "runtime error": "return n + 0x7fffffff;",
}
TRIED = """
import ctypes, sys, torch
from sparta.specialize.cpu.toolchain import build
library = ctypes.CDLL(str(build("portable", sys.argv[1])))
print("not caught", library.fault(8))
"""
COMPILED = """
import sys, time
from sparta.specialize.cpu.toolchain import build, runnable_isas
for isa in runnable_isas():
    begin = time.perf_counter()
    build(isa)
    print(f"{isa} compiled in {time.perf_counter() - begin:.0f} s", flush=True)
"""


def environment(cache):
    """Return the variables under which a Python can load sanitized kernels."""
    from sparta.measure.machine import probe_compiler

    compiler, reason = probe_compiler()
    if compiler is None:
        raise SystemExit(reason)
    preloaded = []
    for name in ("libasan.so", "libubsan.so"):
        found = subprocess.run(
            [*compiler.command, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        )
        path = Path(found.stdout.strip())
        if not path.is_absolute():
            raise SystemExit(f"{compiler.command[0]} has no {name}; install it (for g++, it comes with gcc)")
        preloaded.append(str(path.resolve()))
    return {
        **os.environ,
        "SPARTA_CPU_SANITIZE": "1",
        "SPARTA_CACHE": str(cache),
        "SPARTA_TEST_CACHE": str(cache),
        "LD_PRELOAD": ":".join(preloaded),
        # Python itself does not free all it has; only what the kernels do is of interest.
        "ASAN_OPTIONS": "detect_leaks=0:detect_odr_violation=0",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]),
    }


def pytest_configure():
    """As a plugin of pytest: let random tests draw few examples, whatever they ask for."""
    from hypothesis import settings

    plain = settings.__init__

    def few(self, *args, **given):
        if isinstance(given.get("max_examples"), int):
            given["max_examples"] = min(given["max_examples"], EXAMPLES)
        plain(self, *args, **given)

    settings.__init__ = few
    settings.register_profile("few", settings.get_profile("default"), max_examples=EXAMPLES, deadline=None)
    settings.load_profile("few")


def prove(variables):
    """Stop unless faults are caught."""
    for caught, body in FAULTS.items():
        source = f'extern "C" __attribute__((visibility("default"))) int fault(int n) {{ {body} }}\n'
        command = [sys.executable, "-c", TRIED, source]
        done = subprocess.run(
            command, env=variables, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
        )
        if done.returncode == 0 or caught not in done.stderr:
            raise SystemExit(f"the sanitizers do not catch a fault ({body}):\n{done.stdout}{done.stderr[-2000:]}")


def main(arguments):
    """Run the tests; return their exit status."""
    with tempfile.TemporaryDirectory(prefix="sparta-sanitize-") as cache:
        variables = environment(Path(cache) / "cache")
        prove(variables)
        sys.stdout.write("faults are caught; the kernels are compiled\n")
        sys.stdout.flush()
        subprocess.run([sys.executable, "-c", COMPILED], env=variables, cwd=ROOT, check=True)
        named = any(Path(argument.split("::")[0]).exists() for argument in arguments)
        chosen = arguments if named else [*arguments, *SELECTION]
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "sanitize", *chosen]
        return subprocess.run(command, env=variables, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
