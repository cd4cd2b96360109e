"""Libraries of operators: compiled once, kept where only the user can write, and used only if whole."""

import ctypes

import pytest

from sparta.errors import MissingPackageError
from sparta.measure.machine import probe_compiler
from sparta.specialize.runtime import cpp_library
from sparta.specialize.runtime.cpp_library import operator_library

needs_compiler = pytest.mark.skipif(probe_compiler()[0] is None, reason="needs a C++ compiler")


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARTA_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "answer.cpp"
    path.write_text('extern "C" int answer() { return ANSWER; }\n')
    return path


@needs_compiler
def test_a_change_of_flags_or_of_what_is_included_compiles_anew(source, tmp_path):
    included = tmp_path / "other.h"
    included.write_text("// one\n")
    first = operator_library("answers", source, ["-DANSWER=1"], [included])
    written = first.stat().st_mtime_ns
    assert operator_library("answers", source, ["-DANSWER=1"], [included]) == first
    assert first.stat().st_mtime_ns == written
    assert operator_library("answers", source, ["-DANSWER=2"], [included]) != first
    included.write_text("// two\n")
    assert operator_library("answers", source, ["-DANSWER=1"], [included]) != first
    assert ctypes.CDLL(str(first)).answer() == 1


@needs_compiler
@pytest.mark.parametrize("spoil", [lambda data: data[:100], lambda data: data[:-1] + b"?"], ids=["cut", "changed"])
def test_a_library_that_was_tampered_with_is_compiled_anew(source, spoil):
    library = operator_library("answers", source, ["-DANSWER=3"])
    whole = library.read_bytes()
    library.write_bytes(spoil(whole))
    assert operator_library("answers", source, ["-DANSWER=3"]).read_bytes() == whole


@needs_compiler
def test_a_compiler_that_fails_is_quoted(source):
    with pytest.raises(MissingPackageError, match="does not compile"):
        operator_library("answers", source, ["-DANSWER=}"])


def test_without_a_compiler_it_says_so(source, monkeypatch):
    monkeypatch.setattr(cpp_library, "probe_compiler", lambda: (None, "no C++ compiler was found"))
    with pytest.raises(MissingPackageError, match=r"no C\+\+ compiler"):
        operator_library("answers", source)
