"""Signed artifacts: loaded with a key, every byte of a file is as its author signed it."""

import pytest
import torch

import sparta
from compiler import nets
from sparta.errors import FileFormatError, SignatureError
from sparta.signing import SigningKey, signature_path


@pytest.fixture(scope="module")
def signed(tmp_path_factory):
    """Return the path of a signed model, its key and an input."""
    folder = tmp_path_factory.mktemp("signed")
    key, x = SigningKey.new(), torch.randn(6, 32)
    sparta.compile(nets.pruned(nets.Mlp()), x, tune="off").save(folder / "model.sparta", sign=key)
    key.save(folder / "team.key")
    key.public.save(folder / "team.pub")
    return folder / "model.sparta", key, x


def test_a_signed_model_loads_with_its_key_in_every_form(signed):
    path, key, x = signed
    plain = sparta.load(path)(x)
    for given in (key.public, str(key.public), path.parent / "team.pub", str(path.parent / "team.pub")):
        assert torch.equal(sparta.load(path, key=given)(x), plain)


def test_a_model_is_signed_by_the_file_of_a_key(signed, tmp_path):
    path, key, _ = signed
    sparta.load(path).save(tmp_path / "again.sparta", sign=path.parent / "team.key")
    sparta.load(tmp_path / "again.sparta", key=key.public)


def test_every_byte_counts(signed, tmp_path):
    path, key, _ = signed
    whole, other = path.read_bytes(), tmp_path / "model.sparta"
    signature_path(other).write_bytes(signature_path(path).read_bytes())
    header = int.from_bytes(whole[:8], "little")
    for place in (0, 8, 8 + header // 2, 7 + header, 8 + header, len(whole) - 1):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        other.write_bytes(damaged)
        with pytest.raises(SignatureError, match=r"model\.sparta is not what was signed"):
            sparta.load(other, key=key.public)
    for damaged in (whole[:-1], whole + b" ", b""):
        other.write_bytes(damaged)
        with pytest.raises(SignatureError, match="not what was signed"):
            sparta.load(other, key=key.public)


def test_another_model_with_a_right_checksum_is_refused(signed, tmp_path):
    path, key, x = signed
    other = tmp_path / "model.sparta"
    sparta.compile(nets.pruned(nets.Mlp()), x, tune="off").save(other)
    with pytest.raises(SignatureError, match="has no signature"):
        sparta.load(other, key=key.public)
    signature_path(other).write_bytes(signature_path(path).read_bytes())
    with pytest.raises(SignatureError, match="not what was signed"):
        sparta.load(other, key=key.public)
    sparta.load(other)  # who asks for no key gets what any file may be
    with pytest.raises(SignatureError, match="is signed by the key"):
        sparta.load(path, key=SigningKey.new().public)


def test_a_bad_key_is_told_before_the_work_is_done(signed, tmp_path):
    path, _, _ = signed
    with pytest.raises(FileFormatError, match="cannot read missing"):
        sparta.load(path, key="missing")
    with pytest.raises(FileFormatError, match="cannot read missing"):
        sparta.load(path).save(tmp_path / "model.sparta", sign="missing")
    assert not list(tmp_path.iterdir())
