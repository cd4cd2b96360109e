"""The registry: the same in every process, whatever was imported before, with dense first in each operation."""

import subprocess
import sys

import pytest

from sparta.errors import ValueRangeError
from sparta.specialize import implement as registry
from sparta.specialize.builtin import IMPLEMENTS
from sparta.specialize.implement import Implement, Support, implements_of, register

ORDERS = [
    "",
    "import sparta.specialize.int8_linear.quantization",
    "import sparta.specialize.linear.tvm, sparta.specialize.linear.cpu, sparta.specialize.moe.triton_ragged",
    "import sparta.specialize.matmul.cpu, sparta.specialize.conv.cpu, sparta.specialize.attention.triton_flash",
    "import sparta.compiler.api",
    "import sparta.nn",
]


class Extra(Implement):
    """An implement that somebody adds."""

    name, op = "extra", "linear"

    def supports(self, spec):
        del spec
        return Support.yes()

    def build(self, spec, params):
        raise NotImplementedError


def test_the_registry_does_not_depend_on_what_was_imported():
    # One process imports torch, and a fork of it for each order imports the rest.
    code = f"""
import os, torch
for before in {ORDERS!r}:
    if os.fork() == 0:
        exec(before)
        from sparta.specialize.implement import _registry
        print(" ".join("/".join(key) for key in _registry()), flush=True)
        os._exit(0)
    os.wait()
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert shown == [" ".join(f"{cls.op}/{cls.name}" for cls in IMPLEMENTS)] * len(ORDERS)


def test_dense_is_the_first_of_every_operation():
    operations = dict.fromkeys(cls.op for cls in IMPLEMENTS)
    assert len(operations) == 12
    assert {op: implements_of(op)[0].name for op in operations} == dict.fromkeys(operations, "dense")


def test_an_implement_of_others_comes_after_ours_even_if_it_is_registered_first(monkeypatch):
    monkeypatch.setattr(registry, "_REGISTRY", {})
    assert register(Extra) is Extra
    names = [implement.name for implement in implements_of("linear")]
    assert names == [*(cls.name for cls in IMPLEMENTS if cls.op == "linear"), "extra"]


def test_a_name_is_given_once(monkeypatch):
    monkeypatch.setattr(registry, "_REGISTRY", {})
    register(Extra)
    with pytest.raises(ValueRangeError, match="registered already"):
        register(Extra)
    with pytest.raises(ValueRangeError, match="registered already"):
        register(type("Mine", (Extra,), {"name": "cpu"}))
