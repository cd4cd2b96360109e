"""Implements: a no carries a cause that programs can decide by, for every implement that comes with the package."""

import ast
from pathlib import Path

import pytest
import torch

import sparta.specialize
from sparta.specialize.implement import Cause, Support, implement_named, supported
from sparta.specialize.kernel_spec import Epilogue
from sparta.specialize.linear.spec import linear_spec
from sparta.tesa.attribute import TeSA

SOURCES = sorted(Path(sparta.specialize.__file__).parent.rglob("*.py"))


@pytest.mark.parametrize("cause", list(Cause))
def test_a_no_survives_being_written_down(cause):
    no = Support.no("why not", cause)
    assert not no
    assert Support.from_dict(no.to_dict()) == no


@pytest.mark.parametrize("stored", ["no compiler", {"reason": "no compiler"}, {"reason": "no compiler", "cause": "?"}])
def test_a_no_of_another_version_is_read(stored):
    assert Support.from_dict(stored) == Support.no("no compiler", Cause.OTHER)


def test_every_implement_gives_a_cause():
    calls = [
        (path.name, call.lineno, len(call.args) + len(call.keywords))
        for path in SOURCES
        if path.name != "implement.py" or path.parent.name != "specialize"
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "Support.no"
    ]
    assert len(calls) > 30
    assert [call for call in calls if call[-1] != 2] == []


def _spec(device="cpu", dtype="fp32", rows=64, mask=None, epilogue=None):
    mask = torch.rand(64, 64, generator=torch.Generator().manual_seed(0)) < 0.1 if mask is None else mask
    return linear_spec(TeSA.from_mask(mask), rows, dtype=dtype, device=device, epilogue=epilogue)


def test_causes_are_those_of_the_obstacle():
    assert supported(_spec())[1]["cuda-24"].cause is Cause.DEVICE
    assert supported(_spec("cuda"))[1]["cpu"].cause is Cause.DEVICE
    assert supported(_spec("cuda"))[1]["cusparselt"].cause is Cause.DTYPE
    assert supported(_spec(dtype="fp64"))[1]["cpu"].cause is Cause.DTYPE
    assert supported(_spec("cuda", "bf16", rows=65))[1]["cuda-24"].cause is Cause.SHAPE
    assert supported(_spec(mask=torch.ones(64, 64, dtype=torch.bool)))[1]["torch-csr"].cause is Cause.PATTERN
    after = _spec("cuda", epilogue=Epilogue(activation="relu6"))
    assert supported(after)[1]["triton-block"].cause is Cause.EPILOGUE


def test_a_machine_without_a_compiler_lacks_a_tool(monkeypatch):
    monkeypatch.setattr("sparta.specialize.cpu.device.prebuilt", lambda: None)
    monkeypatch.setattr("sparta.specialize.cpu.device._missing_compiler", lambda *_: "no C++ compiler")
    assert implement_named("cpu", "linear").supports(_spec()) == Support.no("no C++ compiler", Cause.MISSING_TOOL)
