"""Signatures: those of the standard and of minisign are right, and nothing else is."""

import stat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparta.errors import FileFormatError, SignatureError, SpartaError
from sparta.signing import PublicKey, SigningKey, ed25519, signature_path, signer, verifier, verify

# Seed, public key, text and signature: RFC 8032, section 7.1.
STANDARD = [
    (
        "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        (
            "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24"
            "655141438e7a100b"
        ),
    ),
    (
        "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        (
            "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aee"
            "b00d291612bb0c00"
        ),
    ),
]
# The key of minisign's author, and its signatures of the text "test", of both kinds.
MINISIGN_KEY = "RWQf6LRCGA9i53mlYecO4IzT51TGPpvWucNSCh1CBM0QTaLn73Y7GFO3"
MINISIGN = [
    (
        "untrusted comment: signature from minisign secret key\n"
        "RWQf6LRCGA9i59SLOFxz6NxvASXDJeRtuZykwQepbDEGt87ig1BNpWaVWuNrm73YiIiJbq71Wi+dP9eKL8OC351vwIasSSbXxwA=\n"
        "trusted comment: timestamp:1555779966\tfile:test\n"
        "QtKMXWyYcwdpZAlPF7tE2ENJkRd1ujvKjlj1m9RtHTBnZPa5WKU5uWRs5GoP5M/VqE81QFuMKI5k/SfNQUaOAA=="
    ),
    (
        "untrusted comment: signature from minisign secret key\n"
        "RUQf6LRCGA9i559r3g7V1qNyJDApGip8MfqcadIgT9CuhV3EMhHoN1mGTkUidF/z7SrlQgXdy8ofjb7bNJJylDOocrCo8KLzZwo=\n"
        "trusted comment: timestamp:1556193335\tfile:test\n"
        "y/rUw2y8/hOUYjZU71eHp/Wo1KZ40fGy2VJEDl34XMJM+TX48Ss/17u3IvIfbVR1FkZZSNCisQbuQY+bHwhEBg==\n"
    ),
]
ORDER = 2**252 + 27742317777372353535851937790883648493


@pytest.fixture(scope="module")
def key():
    return SigningKey(b"number 1", bytes(range(32)))


@pytest.mark.parametrize(("seed", "public", "text", "signature"), STANDARD)
def test_the_vectors_of_the_standard(seed, public, text, signature):
    seed, public, text, signature = map(bytes.fromhex, (seed, public, text, signature))
    assert ed25519.public_key(seed) == public
    assert ed25519.sign(seed, text) == signature
    assert ed25519.verified(public, text, signature)
    assert not ed25519.verified(public, text + b"!", signature)


@given(seed=st.binary(min_size=32, max_size=32), text=st.binary(max_size=40), bit=st.integers(0, 511))
@settings(max_examples=15, deadline=None)
def test_one_bit_of_a_signature_is_all_of_it(seed, text, bit):
    public, signature = ed25519.public_key(seed), bytearray(ed25519.sign(seed, text))
    assert ed25519.verified(public, text, bytes(signature))
    signature[bit // 8] ^= 1 << bit % 8
    assert not ed25519.verified(public, text, bytes(signature))


def test_numbers_of_another_form_are_refused(key):
    public, signature = key.public.point, ed25519.sign(key.seed, b"text")
    larger = (int.from_bytes(signature[32:], "little") + ORDER).to_bytes(32, "little")
    assert not ed25519.verified(public, b"text", signature[:32] + larger)
    assert not ed25519.verified(public, b"text", signature[:-1])
    assert not ed25519.verified(public[:-1], b"text", signature)
    assert not ed25519.verified((2**255 - 18).to_bytes(32, "little"), b"text", signature)  # 1, written as p + 1
    # The neutral point as a key: any text would be signed by the neutral point and 0.
    neutral = (1).to_bytes(32, "little")
    assert not ed25519.verified(neutral, b"text", neutral + bytes(32))


@pytest.mark.parametrize("signature", MINISIGN)
def test_what_minisign_signed(signature):
    public = PublicKey.of(MINISIGN_KEY)
    verify(b"test", signature, public)
    verify(b"test", signature.replace("\n", "\r\n"), public)
    with pytest.raises(SignatureError, match="not what was signed"):
        verify(b"Test", signature, public)
    with pytest.raises(SignatureError, match="the comment in the signature"):
        verify(b"test", signature.replace("file:test", "file:best"), public)
    assert str(public) == MINISIGN_KEY


def test_a_file_with_its_signature(tmp_path, key):
    path = tmp_path / "file"
    path.write_bytes(b"data")
    signer(path, key)(b"data")
    check = verifier(path, key.public)
    check(b"data")
    for damaged in (b"", b"datA", b"data "):
        with pytest.raises(SignatureError, match="not what was signed"):
            check(damaged)
    other = SigningKey.new().public
    with pytest.raises(SignatureError, match="is signed by the key"):
        verifier(path, other)(b"data")
    forged = PublicKey(key.number, other.point)  # the same number proves nothing
    with pytest.raises(SignatureError, match="not what was signed"):
        verifier(path, forged)(b"data")
    signature_path(path).unlink()
    with pytest.raises(SignatureError, match="no signature"):
        check(b"data")
    assert signer(path, None) is None
    assert verifier(path, None) is None


@pytest.mark.parametrize("password", [None, "open"])
def test_keys_are_kept_in_files(tmp_path, key, password):
    path = tmp_path / "team.key"
    key.save(path, password)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert SigningKey.load(path, password) == key
    key.public.save(tmp_path / "team.pub")
    assert PublicKey.of(tmp_path / "team.pub") == PublicKey.of(str(tmp_path / "team.pub")) == key.public
    assert "seed" not in repr(key)
    if password is not None:
        with pytest.raises(SignatureError, match="locked by a password"):
            SigningKey.of(path)
        with pytest.raises(SignatureError, match="the password is wrong"):
            SigningKey.load(path, "shut")


def test_each_damage_to_a_key_file_is_noticed(tmp_path, key):
    path = tmp_path / "team.key"
    key.save(path)
    whole = path.read_text()
    for damaged in ("", "x", whole[:-9], whole.replace("untrusted", "trusted"), whole[:60] + "!" + whole[61:]):
        path.write_text(damaged)
        with pytest.raises(FileFormatError):
            SigningKey.load(path)
    place = whole.rindex("=") - 8
    path.write_text(whole[:place] + ("A" if whole[place] != "A" else "B") + whole[place + 1 :])
    with pytest.raises(SignatureError, match="the file is damaged"):
        SigningKey.load(path)
    path.write_bytes(b"\xff" * 9000)
    with pytest.raises(FileFormatError):
        PublicKey.of(path)


@pytest.mark.parametrize("wrong", [3, None, b"RW", "missing", "RW" + "!" * 54, "RW" + "A" * 54])
def test_what_is_no_key(wrong, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for take in (PublicKey.of, SigningKey.of):
        with pytest.raises(SpartaError):
            take(wrong)


@pytest.mark.parametrize(
    "text", ["", "a\nb\nc\nd", "a\n\ntrusted comment: x\n\n", "a\nAAAA\ntrusted comment: x\nAAAA\n"]
)
def test_what_is_no_signature(text, key):
    with pytest.raises(FileFormatError, match=r"model\.sparta"):
        verify(b"data", text, key.public, "model.sparta")


def test_a_comment_has_one_line(key):
    with pytest.raises(SpartaError, match="one line"):
        key.signature(b"data", "a\nb")
