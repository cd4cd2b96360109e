"""The public names of sparta.specialize: all there, the same objects as in their modules, without optional tools."""

import subprocess
import sys

import pytest

from sparta import specialize
from sparta.specialize import implement, kernel_spec
from sparta.specialize.linear.spec import linear_spec
from sparta.specialize.tuning import select, store


def test_every_public_name_is_the_one_of_its_module():
    modules = [implement, kernel_spec, select, store]
    for name in specialize.__all__:
        found = [getattr(module, name) for module in modules if name in module.__all__]
        assert found[:1] == [getattr(specialize, name)] or getattr(specialize, name) is linear_spec
    assert dir(specialize) == sorted(specialize.__all__)


def test_an_unknown_name_is_an_error_with_the_name_that_was_meant():
    with pytest.raises(AttributeError, match="KernelSpec"):
        specialize.KernelSpek  # noqa: B018


def test_they_need_neither_triton_nor_a_compiler_nor_a_gpu():
    code = (
        "import os, sys; sys.modules['triton'] = None; sys.modules['tvm'] = None; os.environ['PATH'] = ''\n"
        "os.environ['CXX'] = ''\n"
        "import sparta.specialize as s\n"
        "assert all(getattr(s, name) is not None for name in s.__all__)\n"
        "print(len(s.implements_of('linear')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(specialize.implements_of("linear"))
