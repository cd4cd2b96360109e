"""Sparse models of transformers to folders and back."""

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

import sparta
import sparta.hf
from sparta.errors import FileFormatError, NameNotFoundError
from sparta.nn import SparseLinear

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def bert():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    model = transformers.BertModel(config).eval()
    spec = sparta.Spec.from_pattern(model, sparta.Block(4, 1), 0.75, include="re:encoder.*dense.weight")
    spec.apply(model)
    return model, spec


@pytest.fixture
def folder(bert, tmp_path):
    model, spec = bert
    return sparta.hf.save_pretrained(model, tmp_path / "sparse", spec, notes="Spearman 0.81 on STS-B.")


def outputs(model):
    with torch.no_grad():
        return model(torch.arange(16).reshape(2, 8)).last_hidden_state


def test_a_folder_comes_back_sparse_and_equal(bert, folder):
    model = sparta.hf.from_pretrained(folder)
    assert type(model) is transformers.BertModel
    assert sum(isinstance(each, SparseLinear) for each in model.modules()) == len(bert[1])
    torch.testing.assert_close(outputs(model), outputs(bert[0]), rtol=1e-4, atol=1e-5)


def test_a_folder_is_a_dense_checkpoint_for_everyone_else(bert, folder):
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    model = transformers.AutoModel.from_pretrained(folder).eval()
    torch.testing.assert_close(outputs(model), outputs(bert[0]), rtol=0, atol=0)
    assert not any(isinstance(each, SparseLinear) for each in model.modules())


def test_the_quantizer_loads_sparse_layers_and_saves_dense_ones(bert, folder, tmp_path):
    model = transformers.AutoModel.from_pretrained(folder, quantization_config=sparta.hf.sparse_config())
    assert any(isinstance(each, SparseLinear) for each in model.modules())
    torch.testing.assert_close(outputs(model.eval()), outputs(bert[0]), rtol=1e-4, atol=1e-5)
    again = sparta.hf.save_pretrained(model, tmp_path / "again")
    assert "quantization_config" not in json.loads((again / "config.json").read_text())
    dense = transformers.AutoModel.from_pretrained(again).eval()
    torch.testing.assert_close(outputs(dense), outputs(bert[0]), rtol=0, atol=0)


def test_the_model_card_says_what_is_pruned(folder):
    text = (folder / "README.md").read_text()
    assert "75.0% of the weights" in text
    assert "block 4×1" in text
    assert "Spearman 0.81" in text


def test_a_folder_without_a_spec_is_read_by_its_zeros(bert, folder):
    (folder / "sparta_spec.safetensors").unlink()
    model = sparta.hf.from_pretrained(folder)
    assert any(isinstance(each, SparseLinear) for each in model.modules())


def test_a_dense_model_on_request(folder):
    model = sparta.hf.from_pretrained(folder, sparse=False)
    assert not any(isinstance(each, SparseLinear) for each in model.modules())


def test_what_is_refused(tmp_path):
    with pytest.raises(FileFormatError, match=r"config\.json"):
        sparta.hf.from_pretrained(tmp_path)
    with pytest.raises(NameNotFoundError, match="save_pretrained"):
        sparta.hf.save_pretrained(nn.Linear(2, 2), tmp_path / "x")


def test_a_file_in_the_place_of_the_folder(bert, tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(FileFormatError, match="is a file"):
        sparta.hf.save_pretrained(bert[0], tmp_path / "taken")


def test_importing_it_does_not_import_transformers():
    code = "import sys, sparta.hf; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
