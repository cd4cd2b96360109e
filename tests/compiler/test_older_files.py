"""Files that the version before wrote still load, and compute what they computed."""

import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import sparta

FOLDER = Path(__file__).parent / "version1"


@pytest.mark.parametrize("name", ["mlp", "cnn", "int8"])
def test_compiled_models_of_version_1_load(name, tmp_path):
    values = load_file(FOLDER / "values.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a kernel that this processor lacks is replaced, with a warning
        fast = sparta.load(FOLDER / f"{name}.sparta")
    torch.testing.assert_close(fast(values[f"{name}.x"]), values[f"{name}.y"], rtol=1e-4, atol=1e-5)
    fast.save(tmp_path / "again.sparta")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = sparta.load(tmp_path / "again.sparta")
    torch.testing.assert_close(again(values[f"{name}.x"]), values[f"{name}.y"], rtol=1e-4, atol=1e-5)


def test_specs_of_version_1_load():
    spec = sparta.Spec.load(FOLDER / "spec.safetensors")
    assert {"0.weight", "2.weight"} <= set(spec)
