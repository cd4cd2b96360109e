"""The compiler interface: JSON in, JSON and tensors out, and a file that others can read without us."""

import hashlib
import json
import subprocess
import sys

import pytest
import torch

import sparta
from compiler import nets
from sparta.compiler.exchange import reader
from sparta.compiler.exchange.interface import REQUEST, request_for, specialize, write_exchange
from sparta.errors import FileFormatError
from sparta.specialize.kernel_spec import Epilogue, KernelSpec
from sparta.specialize.linear.spec import linear_spec
from sparta.tesa.attribute import TeSA
from sparta.testing import block_mask


@pytest.fixture
def request_and_tensors():
    mask = block_mask((32, 48), (4, 1), 0.8, seed=0)
    epilogue = Epilogue(bias=True, activation="relu", residual=True)
    spec = linear_spec(TeSA.from_mask(mask), 16, torch.float32, epilogue=epilogue)
    return request_for("fc", spec), {"weight": torch.randn(32, 48), "bias": torch.randn(32)}, mask


def test_a_request_is_json_and_says_all(request_and_tensors):
    request, _, _ = request_and_tensors
    again = json.loads(json.dumps(request))
    assert again == request
    assert [call["target"] for call in again["calls"]] == [
        "aten.linear.default",
        "aten.relu.default",
        "aten.add.Tensor",
    ]
    assert again["operands"]["result"]["shape"] == [16, 32]
    assert KernelSpec.from_dict(again["kernel_spec"]).op == "linear"


@pytest.mark.parametrize("tune", ["quick", "off"])
def test_a_request_is_answered(request_and_tensors, tune):
    request, tensors, mask = request_and_tensors
    found = specialize(json.loads(json.dumps(request)), tensors, tune=tune, budget_s=0.3)
    assert json.loads(json.dumps(found.response)) == found.response
    assert set(found.response["operands"]) == set(found.tensors)
    assert torch.equal(found.tensors["fc/bias"], tensors["bias"])
    stored = found.tensors["fc/packed.0"]
    live = tensors["weight"][mask]
    assert torch.equal(stored[stored != 0].sort().values, live[live != 0].sort().values)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"schema": "other"}, REQUEST),
        ({"version": 2}, "upgrade"),
        ({"version": "1"}, "upgrade"),
        ({"kernel_spec": {}}, "fit together"),
        ({"kernel_spec": None}, "fit together"),
    ],
)
def test_requests_that_cannot_be_read_are_refused(request_and_tensors, change, match):
    request, tensors, _ = request_and_tensors
    with pytest.raises(FileFormatError, match=match):
        specialize({**request, **change}, tensors)


def test_an_exchange_file_needs_only_json_and_safetensors(forced, tmp_path):
    model, x = nets.pruned(nets.Mlp()), torch.randn(6, 32)
    fast = sparta.compile(model, x, tune="off")
    path = tmp_path / "model.exchange"
    write_exchange(fast, path)
    code = (
        "import sys, json, importlib.util; sys.modules['torch'] = None; sys.modules['sparta'] = None; "
        "spec = importlib.util.spec_from_file_location('reader', sys.argv[1]); "
        "reader = importlib.util.module_from_spec(spec); spec.loader.exec_module(reader); "
        "payload, tensors = reader.read_exchange(sys.argv[2]); "
        "print(json.dumps([[s['response']['name'], s['response']['kernel']['language'], "
        "sorted(n for n in s['response']['operands'] if n in tensors)] for s in payload['subgraphs']])); "
        "assert 'api.cpp' in payload['sources'] and payload['graph']"
    )
    command = [sys.executable, "-c", code, reader.__file__, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert {row[0] for row in rows} == set(fast.kernels)
    assert all(language == "c++" and f"{name}/packed.0" in operands for name, language, operands in rows)


def test_other_files_are_refused_by_the_reader(forced, tmp_path):
    fast = sparta.compile(nets.pruned(nets.Mlp()), torch.randn(6, 32), tune="off")
    fast.save(tmp_path / "model.sparta")
    with pytest.raises(ValueError, match="not a sparta exchange file"):
        reader.read_exchange(str(tmp_path / "model.sparta"))


@pytest.fixture(scope="module")
def exchange(tmp_path_factory):
    path = tmp_path_factory.mktemp("exchange") / "model.exchange"
    write_exchange(sparta.compile(nets.pruned(nets.Mlp()), torch.randn(6, 32), tune="off"), path)
    return path.read_bytes()


def test_the_reader_finds_every_changed_byte(exchange, tmp_path):
    path = tmp_path / "changed"
    for place in range(0, len(exchange), len(exchange) // 60):
        path.write_bytes(exchange[:place] + bytes([exchange[place] ^ 1]) + exchange[place + 1 :])
        with pytest.raises(ValueError, match="changed"):
            reader.read_exchange(str(path))
    for data in (b"", exchange[:100], exchange[:-1], b"\xff" * 8, (9).to_bytes(8, "little") + b"[" * 9):
        path.write_bytes(data)
        with pytest.raises(ValueError, match="changed"):
            reader.read_exchange(str(path))


@pytest.mark.parametrize("text", ["[" * 50_000, "[1]", "{", '{"a":' * 200 + "1" + "}" * 200, "null"])
def test_the_reader_refuses_json_that_is_no_object_of_few_levels(tmp_path, text):
    header = {"__metadata__": {"sparta": "exchange", "version": "1", "payload": text}}
    header["__metadata__"]["sha256"] = hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()
    data = json.dumps(header).encode()
    (tmp_path / "odd").write_bytes(len(data).to_bytes(8, "little") + data)
    with pytest.raises(ValueError, match="odd"):
        reader.read_exchange(str(tmp_path / "odd"))
