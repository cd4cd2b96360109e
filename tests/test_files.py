"""Files: whatever a stranger wrote into one is an error that names it, and killed writers leave nothing for long."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from sparta import files
from sparta.errors import FileFormatError, ShapeError
from sparta.files import Budget, kind_of, load_tensors, read_json, read_json_file, reading, save_tensors, write_atomic


def rewritten(path, change):
    """Write the file again with a changed header and a right checksum."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    header["__metadata__"].pop("sha256")
    change(header)
    header["__metadata__"]["sha256"] = files._digest(header, memoryview(body))
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "file.sparta"
    save_tensors(path, "kind", 1, {"a": torch.arange(6.0)}, {"n": 1})
    return path


def test_what_was_saved_is_loaded(saved):
    tensors, payload = load_tensors(saved, "kind", 1)
    assert payload == {"n": 1}
    assert tensors["a"].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("version", ["²", "٣", "-1", "", "1.0", "9" * 30, None, 1, [1]])
def test_a_version_is_a_plain_number(saved, version):
    rewritten(saved, lambda header: header["__metadata__"].update(version=version))
    with pytest.raises(FileFormatError, match=r"file\.sparta has the format version"):
        load_tensors(saved, "kind", 1)


@pytest.mark.parametrize(
    "payload", [None, 3, "[]", "null", "{", '{"a": 1, "a": 2}', "[" * 200_000, '{"a":' * 500 + "1"]
)
def test_a_payload_is_an_object_of_few_levels(saved, payload):
    rewritten(saved, lambda header: header["__metadata__"].update(payload=payload))
    with pytest.raises(FileFormatError, match=r"file\.sparta"):
        load_tensors(saved, "kind", 1)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F99", "shape": [6], "data_offsets": [0, 24]},
        {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 24]},
        {"dtype": "F32", "shape": [-6], "data_offsets": [0, 24]},
        {"dtype": "F32", "shape": [6], "data_offsets": [0, 2**63]},
        {"dtype": "F32", "shape": "six", "data_offsets": [0, 24]},
        {"dtype": "F32"},
        7,
    ],
)
def test_a_tensor_that_does_not_fit_its_bytes_is_refused(saved, entry):
    rewritten(saved, lambda header: header.update(a=entry))
    with pytest.raises(FileFormatError, match=r"file\.sparta"):
        load_tensors(saved, "kind", 1)


@pytest.mark.parametrize("header", [b"[" * 100_000, b"[]", b"null", b'{"__metadata__": 3}', b"\xff\xfe", b""])
def test_a_header_that_is_none_is_refused(tmp_path, header):
    path = tmp_path / "file.sparta"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(FileFormatError, match=r"file\.sparta"):
        load_tensors(path, "kind", 1)


def test_json_is_read_to_a_bounded_depth():
    deep = "[" * 100 + "1" + "]" * 100
    assert json.dumps(read_json(deep, "x")) == deep
    for text in ("[" + deep + "]", "[" * 10**6, '{"a":' * 10**5):
        with pytest.raises(FileFormatError, match="x has JSON that is nested too deeply"):
            read_json(text, "x")


@pytest.mark.parametrize("text", ["", "{", "nope", b"\xff", "1" * 5000, '{"a": 1, "a": 1}', 3])
def test_what_is_no_json_is_an_error_that_names_the_source(text):
    with pytest.raises(FileFormatError, match="the source"):
        read_json(text, "the source")


def test_json_files_are_read_by_path(tmp_path):
    (tmp_path / "a.json").write_text("[1]")
    assert read_json_file(tmp_path / "a.json") == [1]
    with pytest.raises(FileNotFoundError):
        read_json_file(tmp_path / "b.json")


@pytest.mark.parametrize(
    "error",
    [
        *(KeyError("a"), TypeError(), ValueError(), IndexError(), AttributeError(), OverflowError(), RecursionError()),
        *(MemoryError(), RuntimeError(), ZeroDivisionError(), AssertionError(), ShapeError("s"), FileFormatError("f")),
    ],
)
def test_reading_names_the_file_whatever_happens(error):
    with pytest.raises(FileFormatError, match="the file"), reading("the file"):
        raise error


def test_reading_lets_an_interruption_pass():
    with pytest.raises(KeyboardInterrupt), reading("the file"):
        raise KeyboardInterrupt


def test_a_budget_follows_the_file_or_the_caller(tmp_path):
    path = tmp_path / "small"
    path.write_bytes(b"x" * 100)
    assert Budget.of_file(path).limit == 64 * 1024 * 1024
    assert Budget.of_file(path, max_bytes=5).limit == 5
    path.write_bytes(b"x" * (2 * 1024 * 1024))
    assert Budget.of_file(path).limit == 128 * 1024 * 1024


def test_a_budget_is_used_up_by_what_is_taken_and_not_by_what_is_checked():
    budget = Budget(100, "f")
    assert [budget.check((5, 5), 4, "a"), budget.check((25,), 4, "a"), budget.take((5, 5), 2, "a")] == [25] * 3
    with pytest.raises(FileFormatError, match=r"f: b of shape \(51,\) takes 51 bytes; allowed: 50 bytes more"):
        budget.take((51,), 1, "b")
    assert budget.take((50,), 1, "b") == 50
    assert budget.take((0, 2**61), 8, "nothing") == 0


@pytest.mark.parametrize("size", [-1, 1.0, True, "3", None, 2**62])
def test_a_budget_refuses_what_is_no_size(size):
    with pytest.raises(FileFormatError, match="f: a has the size"):
        Budget(2**80, "f").check((1, size), 1, "a")


_STUCK = """
import os, sys, time
from sparta import files
files.os.fsync = lambda handle: (print("writing", flush=True), time.sleep(600))
files.write_atomic(sys.argv[1], b"half")
"""


def temporaries(folder):
    return [file for file in folder.iterdir() if ".sparta-" in file.name]


def test_the_temporary_file_of_a_killed_writer_is_swept_and_that_of_a_live_one_is_not(tmp_path):
    with subprocess.Popen([sys.executable, "-c", _STUCK, tmp_path / "a"], stdout=subprocess.PIPE) as writer:
        assert writer.stdout.readline() == b"writing\n"
        assert len(temporaries(tmp_path)) == 1
        write_atomic(tmp_path / "b", b"whole")
        assert len(temporaries(tmp_path)) == 1, "its writer lives"
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    write_atomic(tmp_path / "b", b"whole")
    assert [file.name for file in tmp_path.iterdir()] == ["b"]


def test_a_temporary_file_of_another_machine_is_swept_after_an_hour(tmp_path):
    other = tmp_path / ".a.sparta-00000000-1-abc"
    mine = tmp_path / f".a.sparta-{files._host()}-{os.getpid()}-abc"
    users = tmp_path / ".a.sparta-notes"
    for file in (other, mine, users):
        file.write_bytes(b"")
        os.utime(file, (0, 0))
    os.utime(other, (time.time(), time.time()))
    write_atomic(tmp_path / "a", b"")
    assert other.exists()
    os.utime(other, (0, 0))
    write_atomic(tmp_path / "a", b"")
    assert [other.exists(), mine.exists(), users.exists()] == [False, True, True]


def test_names_of_any_length_can_be_written(tmp_path):
    write_atomic(tmp_path / ("n" * 250), b"x")
    assert [len(file.name) for file in tmp_path.iterdir()] == [250]


def test_the_cache_is_where_the_system_keeps_caches_unless_it_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("SPARTA_CACHE", raising=False)
    if sys.platform == "linux":
        assert files.private_folder("tuning") == tmp_path / "xdg" / "sparta" / "tuning"
    monkeypatch.setenv("SPARTA_CACHE", str(tmp_path / "own"))
    assert files.private_folder("tuning") == tmp_path / "own" / "tuning"


@pytest.mark.skipif(sys.platform != "linux", reason="the folder has another name elsewhere")
def test_without_a_word_the_cache_is_below_the_home_folder(tmp_path, monkeypatch):
    for name in ("XDG_CACHE_HOME", "SPARTA_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert files.private_folder("tuning") == tmp_path / ".cache" / "sparta" / "tuning"


@pytest.mark.parametrize("name", ["", ".", "folder", "x" * 300])
def test_a_path_that_cannot_be_written_is_an_error_of_ours(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(FileFormatError, match="cannot write"):
        write_atomic(name, b"data")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_the_kind_of_a_file_takes_no_more_memory_than_the_file_has(tmp_path):
    import tracemalloc

    path = tmp_path / "short"
    path.write_bytes((1 << 40).to_bytes(8, "little") + b"{}")
    tracemalloc.start()
    try:
        assert kind_of(path) is None
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
