"""The folder of compiled kernels: nothing doubtful is loaded, nothing is compiled twice, every failure says what to do.

A small script stands for the compiler where only the bookkeeping is tested.
"""

import ctypes.util
import errno
import os
import shutil
import stat
import threading
import time
from pathlib import Path

import pytest

from sparta.errors import FileFormatError, MissingPackageError, NameNotFoundError, SpartaError, ValueRangeError
from sparta.specialize.cpu import library, toolchain

FAKE_COMPILER = """#!/bin/sh
if [ "$1" = "--version" ]; then echo "fake 1.0"; exit 0; fi
for last; do :; done
case " $* " in *" -E "*) exit 0;; esac
echo call >> {calls}
sleep {delay}
echo "a library" > "$last"
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARTA_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SPARTA_CPU_ISA", raising=False)
    monkeypatch.delenv("SPARTA_CPU_SANITIZE", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def compiler(tmp_path, monkeypatch, cache):
    """A compiler that writes a line of text and counts its calls."""
    calls = tmp_path / "calls"
    calls.touch()

    def install(text=FAKE_COMPILER, delay="0"):
        script = tmp_path / "fake-g++"
        script.write_text(text.format(calls=calls, delay=delay))
        script.chmod(0o700)
        monkeypatch.setenv("CXX", str(script))
        toolchain._probed_compiler.cache_clear()

    install()
    yield install, lambda: len(calls.read_text().split())
    toolchain._probed_compiler.cache_clear()


def test_a_library_is_compiled_once(compiler, cache):
    _, calls = compiler
    first = toolchain.build("portable")
    assert first.read_text() == "a library\n"
    assert toolchain.build("portable") == first
    assert calls() == 1
    assert first.is_relative_to(cache)


def test_the_folder_is_the_users_alone(compiler, cache):
    folder = toolchain.build("portable").parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-1] + b"!"),
        lambda path: path.write_bytes(path.read_bytes()[:3]),
        lambda path: path.write_bytes(b""),
        lambda path: path.unlink(),
        lambda path: path.with_suffix(".sha256").write_text("0" * 64),
        lambda path: path.with_suffix(".sha256").write_bytes(b"\xff"),
        lambda path: path.with_suffix(".sha256").unlink(),
    ],
    ids=["tampered", "truncated", "empty", "missing", "wrong checksum", "damaged checksum", "no checksum"],
)
def test_a_damaged_library_is_built_again(compiler, damage):
    _, calls = compiler
    path = toolchain.build("portable")
    damage(path)
    assert toolchain.build("portable") == path
    assert calls() == 2
    assert path.read_text() == "a library\n"
    toolchain.build("portable")
    assert calls() == 2


def as_a_link(path):
    path.rename(path.with_suffix(".elsewhere"))
    path.symlink_to(path.with_suffix(".elsewhere"))


@pytest.mark.parametrize("suffix", [".so", ".sha256"])
@pytest.mark.parametrize(
    "share",
    [as_a_link, lambda path: path.chmod(0o602), lambda path: path.chmod(0o620)],
    ids=["a link", "others may write", "the group may write"],
)
def test_a_library_that_others_may_have_written_is_built_again(compiler, suffix, share):
    _, calls = compiler
    path = toolchain.build("portable")
    share(path.with_suffix(suffix))
    assert toolchain.build("portable") == path
    assert calls() == 2
    assert not path.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_library_of_another_user_is_built_again(compiler, monkeypatch):
    path = toolchain.build("portable")
    assert toolchain._is_intact(path)
    monkeypatch.setattr(toolchain.os, "getuid", lambda: 12345)
    assert not toolchain._is_intact(path)


def test_a_loose_umask_makes_no_shared_library(compiler):
    _, calls = compiler
    before = os.umask(0)
    try:
        path = toolchain.build("portable")
        toolchain.build("portable")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert calls() == 1


@pytest.mark.parametrize("suffix", [".so", ".sha256", ".lock"])
def test_a_full_cache_is_an_error_of_ours_and_compiles_once(compiler, monkeypatch, suffix):
    _, calls = compiler
    full, room = [True], OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    write, lock = toolchain.write_atomic, toolchain.FileLock

    def limited(then):
        def call(path, *data, **options):
            if full[0] and path.suffix == suffix:
                raise room
            return then(path, *data, **options)

        return call

    monkeypatch.setattr(toolchain, "write_atomic", limited(write))
    monkeypatch.setattr(toolchain, "FileLock", limited(lock))
    for _ in range(3):
        with pytest.raises(MissingPackageError, match=r"No space left.*run dense"):
            toolchain.build("portable")
    assert calls() == (0 if suffix == ".lock" else 1)
    full[0] = False
    assert toolchain.build("portable").read_text() == "a library\n"
    assert calls() == 1
    assert not toolchain._unwritten


def test_a_foreign_library_with_a_right_checksum_is_a_fault_of_the_cache(cache, monkeypatch):
    foreign = Path(str(ctypes.util.find_library("m")))
    monkeypatch.setattr(library, "build", lambda isa: foreign)
    library._loaded.cache_clear()
    with pytest.raises(SpartaError, match=r"do not load.*sparta_lanes.*delete"):
        library.load("portable")
    library._loaded.cache_clear()


def test_the_path_follows_sources_flags_and_compiler(compiler, tmp_path, monkeypatch):
    install, _ = compiler
    paths = {toolchain.build("portable")}
    monkeypatch.setenv("SPARTA_CPU_SANITIZE", "1")
    paths.add(toolchain.build("portable"))
    monkeypatch.setenv("SPARTA_CPU_SANITIZE", "0")
    assert toolchain.build("portable") in paths
    install(FAKE_COMPILER.replace("fake 1.0", "fake 1.1"))
    paths.add(toolchain.build("portable"))
    copied = tmp_path / "native"
    shutil.copytree(toolchain.SOURCES, copied)
    (copied / "simd.h").write_text("// changed")
    monkeypatch.setattr(toolchain, "SOURCES", copied)
    paths.add(toolchain.build("portable"))
    assert len(paths) == 4


def test_builders_at_the_same_time_compile_once(compiler):
    install, calls = compiler
    install(delay="0.3")
    found = []
    builders = [threading.Thread(target=lambda: found.append(toolchain.build("portable"))) for _ in range(4)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    assert calls() == 1


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
@pytest.mark.parametrize("level", ["", "cpu"])
def test_a_folder_others_can_write_is_refused(compiler, cache, mode, level):
    _, calls = compiler
    toolchain.build("portable")
    (cache / level).chmod(mode)
    with pytest.raises(FileFormatError, match="chmod go-w"):
        toolchain.build("portable")
    assert calls() == 1


def test_a_folder_of_another_user_is_refused(compiler, monkeypatch):
    toolchain.build("portable")
    monkeypatch.setattr(toolchain.os, "getuid", lambda: 12345)
    with pytest.raises(FileFormatError, match="belongs to another user"):
        toolchain.build("portable")


def test_a_folder_that_cannot_be_made_is_named(compiler, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPARTA_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(FileFormatError, match="set SPARTA_CACHE"):
        toolchain.build("portable")
    monkeypatch.setenv("SPARTA_CACHE", str(tmp_path / "file"))
    with pytest.raises(FileFormatError, match="set SPARTA_CACHE"):
        toolchain.build("portable")


def test_without_a_compiler_the_error_says_what_to_install(cache, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(MissingPackageError, match=r"install g\+\+ or set CXX.*run dense"):
        library.load("portable")


def test_windows_is_told_to_run_dense(cache, monkeypatch):
    monkeypatch.setattr(toolchain.sys, "platform", "win32")
    with pytest.raises(MissingPackageError, match="run dense"):
        toolchain.build("portable")


def test_a_compiler_that_fails_is_quoted(compiler):
    install, _ = compiler
    install(FAKE_COMPILER.replace("sleep {delay}", 'echo "no such flag" >&2; exit 1'))
    with pytest.raises(MissingPackageError, match=r"(?s)no such flag.*set CXX"):
        toolchain.build("portable")


def test_a_compiler_that_takes_too_long_ends_with_what_it_started(compiler, tmp_path, monkeypatch):
    install, _ = compiler
    install(FAKE_COMPILER.replace("sleep {delay}", f"sleep 1000 & echo $! > {tmp_path}/child; wait"))
    monkeypatch.setattr(toolchain, "_COMPILE_SECONDS", 1)
    with pytest.raises(MissingPackageError, match="timed out"):
        toolchain.build("portable")
    child = int((tmp_path / "child").read_text())
    for _ in range(100):  # until it is gone, or waits for whoever adopts it
        state = Path(f"/proc/{child}/stat").read_text().split()[2] if Path(f"/proc/{child}").exists() else "Z"
        if state == "Z":
            break
        time.sleep(0.05)
    assert state == "Z"


def test_a_compiler_is_not_run_under_what_this_process_is(compiler, tmp_path, monkeypatch):
    install, _ = compiler
    install(FAKE_COMPILER.replace("sleep {delay}", f'echo "[$LD_PRELOAD]" > {tmp_path}/preloaded'))
    monkeypatch.setenv("LD_PRELOAD", "no-such-library.so")
    toolchain.build("portable")
    assert (tmp_path / "preloaded").read_text().strip() == "[]"


def test_a_compiler_that_cannot_start_is_an_error(compiler, tmp_path):
    toolchain._compiler()
    (tmp_path / "fake-g++").unlink()
    with pytest.raises(MissingPackageError, match="fake-g"):
        toolchain.build("portable")


def test_a_library_that_does_not_load_is_an_error(compiler):
    with pytest.raises(SpartaError, match="do not load"):
        library.load("portable")


def test_the_instruction_set_is_chosen(monkeypatch):
    monkeypatch.delenv("SPARTA_CPU_ISA", raising=False)
    assert toolchain.chosen_isa() == toolchain.runnable_isas()[0]
    monkeypatch.setenv("SPARTA_CPU_ISA", "portable")
    assert toolchain.chosen_isa() == "portable"
    with pytest.raises(NameNotFoundError, match="did you mean 'avx2'"):
        toolchain.chosen_isa("avx")


def test_an_instruction_set_the_processor_lacks_is_refused(monkeypatch):
    monkeypatch.setattr(toolchain, "_cpu_flags", lambda: ("avx2", "fma"))
    monkeypatch.delenv("SPARTA_CPU_ISA", raising=False)
    assert toolchain.runnable_isas() == ("avx2", "portable")
    assert toolchain.chosen_isa() == "avx2"
    with pytest.raises(ValueRangeError, match="does not have; allowed: avx2, portable"):
        toolchain.chosen_isa("avx512")
