"""The registry: the same in every process, whatever was imported before, with dense first in each operation."""

import subprocess
import sys

import pytest

from sparta.errors import ValueRangeError
from sparta.specialize import implement as registry
from sparta.specialize.builtin import IMPLEMENTS
from sparta.specialize.implement import Implement, Support, implements_of, register

SHOW = "from sparta.specialize.implement import _registry\nprint(*(' '.join(key) for key in _registry()), sep='\\n')"
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


def shown(before):
    code = f"{before}\n{SHOW}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.parametrize("before", ORDERS)
def test_the_registry_does_not_depend_on_what_was_imported(before):
    assert shown(before) == [f"{cls.op} {cls.name}" for cls in IMPLEMENTS]


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
