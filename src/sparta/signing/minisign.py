"""Keys and signatures as the minisign tool writes them, so that either side can check what the other signed.

A signature lies beside its file as ``FILE.minisig``: it signs the BLAKE2b-512 of all bytes of the file, and a second
one signs the first with a comment that can be trusted. A key file has one line of comment and one of base64.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from sparta.errors import FileFormatError, SignatureError, ValueRangeError, message
from sparta.files import write_atomic
from sparta.signing import ed25519

__all__ = ["PublicKey", "SigningKey", "signature_path", "signer", "verifier", "verify"]

_SUFFIX = ".minisig"
_DIRECT, _HASHED = b"Ed", b"ED"  # what a signature is of: the bytes themselves, or their BLAKE2b-512
_SCRYPT, _PLAIN, _CHECKSUM = b"Sc", b"\0\0", b"B2"
_OPERATIONS, _MEMORY = 2**19, 2**24  # of scrypt, for keys that we write
_MOST_OPERATIONS, _MOST_MEMORY = 2**25, 2**30  # what minisign itself uses
_LONGEST = 8192  # bytes of a key file or a signature
_UNTRUSTED, _TRUSTED = "untrusted comment: ", "trusted comment: "


@dataclass(frozen=True)
class PublicKey:
    """What checks signatures: the number of a key, and its 32 public bytes.

    Examples
    --------
    >>> key = SigningKey.new()
    >>> PublicKey.of(str(key.public)) == key.public
    True
    """

    number: bytes
    point: bytes

    def __post_init__(self) -> None:
        _check_lengths(self.number, self.point)

    @staticmethod
    def of(given: object) -> PublicKey:
        """Return a key that is given as such, by its line of base64 (``RW...``), or by its file."""
        if isinstance(given, PublicKey):
            return given
        if not isinstance(given, str | os.PathLike):
            allowed = "a PublicKey, its text (RW...), or the path of its file"
            raise ValueRangeError(message(f"a key of type {type(given).__name__}", allowed))
        text = os.fspath(given)
        if isinstance(text, str) and text.startswith("RW") and len(text) == 56 and not Path(text).exists():
            return PublicKey._read(text, "the key")
        return PublicKey._read(_second_line(Path(given)), str(given))

    @staticmethod
    def _read(text: str, source: str) -> PublicKey:
        data = _bytes(text, 42, source, "a public key")
        if data[:2] != _DIRECT:
            raise FileFormatError(message(f"{source} is no public key", "a public key of minisign (RW...)"))
        return PublicKey(data[2:10], data[10:])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the key to a file, for those who load what it signs."""
        write_atomic(path, f"{_UNTRUSTED}minisign public key {_shown(self.number)}\n{self}\n".encode())

    def __str__(self) -> str:
        return _text(_DIRECT + self.number + self.point)


@dataclass(frozen=True)
class SigningKey:
    """What signs: the number of a key, and its 32 secret bytes. Keep it to yourself.

    Examples
    --------
    >>> key = SigningKey.new()
    >>> verify(b"text", key.signature(b"text"), key.public)
    """

    number: bytes
    seed: bytes = field(repr=False)

    def __post_init__(self) -> None:
        _check_lengths(self.number, self.seed)

    @staticmethod
    def new() -> SigningKey:
        """Return a key that nobody has."""
        return SigningKey(secrets.token_bytes(8), secrets.token_bytes(32))

    @staticmethod
    def of(given: object) -> SigningKey:
        """Return a key that is given as such, or by its file, which must not ask for a password."""
        if not isinstance(given, SigningKey | str | os.PathLike):
            allowed = "a SigningKey or the path of its file"
            raise ValueRangeError(message(f"a signing key of type {type(given).__name__}", allowed))
        return given if isinstance(given, SigningKey) else SigningKey.load(given)

    @staticmethod
    def load(path: str | os.PathLike[str], password: str | None = None) -> SigningKey:
        """Return the key of a file, as :meth:`save` or ``minisign -G`` wrote it."""
        data = _bytes(_second_line(Path(path)), 158, str(path), "a secret key")
        kind, kdf, checksum, salt = data[:2], data[2:4], data[4:6], data[6:38]
        if kind != _DIRECT or checksum != _CHECKSUM or kdf not in (_SCRYPT, _PLAIN):
            raise FileFormatError(message(f"{path} is no secret key", "a secret key of minisign"))
        secret = data[54:]
        if kdf == _SCRYPT:
            if password is None:
                fix = "pass SigningKey.load(path, password=...)"
                raise SignatureError(message(f"{path} is locked by a password", fix=fix))
            operations, memory = (int.from_bytes(data[at : at + 8], "little") for at in (38, 46))
            secret = _locked(secret, password, salt, operations, memory)
        number, seed, point, check = secret[:8], secret[8:40], secret[40:72], secret[72:]
        if not hmac.compare_digest(check, _check(secret[:72])) or ed25519.public_key(seed) != point:
            why = "the password is wrong, or the file is damaged" if kdf == _SCRYPT else "the file is damaged"
            raise SignatureError(message(f"{path} does not open: {why}"))
        return SigningKey(number, seed)

    def save(self, path: str | os.PathLike[str], password: str | None = None) -> None:
        """Write the key to a file that only its owner can read, locked by a password if there is one."""
        secret = self.number + self.seed + self.public.point
        secret += _check(secret)
        salt, kdf, limits = bytes(32), _PLAIN, (0, 0)
        if password is not None:
            salt, kdf, limits = secrets.token_bytes(32), _SCRYPT, (_OPERATIONS, _MEMORY)
            secret = _locked(secret, password, salt, *limits)
        head = _DIRECT + kdf + _CHECKSUM + salt + b"".join(limit.to_bytes(8, "little") for limit in limits)
        what = "minisign encrypted secret key" if password is not None else "minisign secret key"
        write_atomic(path, f"{_UNTRUSTED}{what}\n{_text(head + secret)}\n".encode(), private=True)

    @property
    def public(self) -> PublicKey:
        """What others need to check its signatures."""
        return PublicKey(self.number, ed25519.public_key(self.seed))

    def signature(self, data: bytes, comment: str = "") -> str:
        """Return the text that signs some bytes, and a comment of one line."""
        if "\n" in comment or "\r" in comment:
            raise ValueRangeError(message("a comment of several lines", "one line"))
        signed = ed25519.sign(self.seed, _digest(data))
        both = ed25519.sign(self.seed, signed + comment.encode())
        first = _text(_HASHED + self.number + signed)
        return f"{_UNTRUSTED}signature by sparta\n{first}\n{_TRUSTED}{comment}\n{_text(both)}\n"


def verify(data: bytes, signature: str, key: PublicKey, source: str = "the data") -> None:
    """Raise SignatureError unless a signature is of these bytes and by this key.

    >>> key = SigningKey.new()
    >>> verify(b"text!", key.signature(b"text"), key.public, "model.sparta")
    Traceback (most recent call last):
    sparta.errors.SignatureError: model.sparta is not what was signed: it was changed, or another file was signed; ...
    """
    lines = signature.replace("\r\n", "\n").split("\n")
    if len(lines) < 4 or not lines[2].startswith(_TRUSTED):
        raise SignatureError(message(f"the signature of {source} is damaged", "four lines, as minisign writes them"))
    first = _bytes(lines[1], 74, f"the signature of {source}", "a signature")
    both = _bytes(lines[3], 64, f"the signature of {source}", "a signature")
    kind, number, signed = first[:2], first[2:10], first[10:]
    if kind not in (_DIRECT, _HASHED):
        raise SignatureError(message(f"the signature of {source} is of an unknown kind", "Ed25519, as by minisign"))
    if number != key.number:
        given = f"{source} is signed by the key {_shown(number)}"
        raise SignatureError(message(given, f"by {_shown(key.number)}", "ask its author which key to trust"))
    if not ed25519.verified(key.point, data if kind == _DIRECT else _digest(data), signed):
        given = f"{source} is not what was signed: it was changed, or another file was signed"
        raise SignatureError(message(given, fix="get the file and its signature again"))
    if not ed25519.verified(key.point, signed + lines[2].removeprefix(_TRUSTED).encode(), both):
        raise SignatureError(message(f"the comment in the signature of {source} was changed"))


def signer(path: str | os.PathLike[str], key: object) -> Callable[[bytes], None] | None:
    """Return what writes the signature of a file's bytes beside it; None where there is no key."""
    if key is None:
        return None
    secret = SigningKey.of(key)

    def write(data: bytes) -> None:
        comment = f"timestamp:{int(time.time())}\tfile:{Path(path).name}\thashed"
        write_atomic(signature_path(path), secret.signature(data, comment).encode())

    return write


def verifier(path: str | os.PathLike[str], key: object) -> Callable[[bytes], None] | None:
    """Return what checks a file's bytes against the signature beside it; None where there is no key."""
    if key is None:
        return None
    public = PublicKey.of(key)

    def check(data: bytes) -> None:
        beside = signature_path(path)
        if not beside.is_file():
            fix = "get it from the author, or load the file without key="
            raise SignatureError(message(f"{os.fspath(path)} has no signature {beside.name} beside it", fix=fix))
        verify(data, _read(beside), public, os.fspath(path))

    return check


def signature_path(path: str | os.PathLike[str]) -> Path:
    """Return where the signature of a file lies.

    >>> signature_path("model.sparta").name
    'model.sparta.minisig'
    """
    return Path(f"{os.fspath(path)}{_SUFFIX}")


def _check_lengths(number: object, rest: object) -> None:
    """Raise unless a key is made of 8 and 32 bytes."""
    for value, length in ((number, 8), (rest, 32)):
        if not isinstance(value, bytes) or len(value) != length:
            fix = "make one with SigningKey.new(), or read one with PublicKey.of(path)"
            raise ValueRangeError(message("a key of other bytes", "8 bytes of a number and 32 of a key", fix))


def _locked(secret: bytes, password: str, salt: bytes, operations: int, memory: int) -> bytes:
    """Return a secret with a password's bytes over it; the same again takes them off."""
    if operations > _MOST_OPERATIONS or memory > _MOST_MEMORY:
        raise FileFormatError(message("a key whose password takes too long to check", "what minisign uses"))
    # How the two limits become the parameters of scrypt is libsodium's.
    operations = max(operations, 32768)
    if operations < memory // 32:
        most, repeated = operations // 32, 1
        rounds = _power_below(most)
    else:
        rounds = _power_below(memory // 1024)
        repeated = max(1, operations // 4 // rounds // 8)
    stream = hashlib.scrypt(
        password.encode(), salt=salt, n=rounds, r=8, p=repeated, maxmem=2**31 - 1, dklen=len(secret)
    )
    return bytes(a ^ b for a, b in zip(secret, stream, strict=True))


def _power_below(most: int) -> int:
    """Return the first power of two, from 2 on, above half of a number."""
    power = 2
    while power <= most // 2:
        power *= 2
    return power


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data).digest()


def _check(secret: bytes) -> bytes:
    return hashlib.blake2b(_DIRECT + secret, digest_size=32).digest()


def _shown(number: bytes) -> str:
    return f"{int.from_bytes(number, 'little'):016X}"


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str, length: int, source: str, what: str) -> bytes:
    try:
        data = base64.b64decode(text.strip(), validate=True)
    except (binascii.Error, ValueError) as error:
        raise FileFormatError(message(f"{source} is no {what.removeprefix('a ')}", "a line of base64")) from error
    if len(data) != length:
        raise FileFormatError(message(f"{source} is no {what.removeprefix('a ')}", f"{length} bytes in base64"))
    return data


def _read(path: Path) -> str:
    """Return a short text file."""
    try:
        with path.open("rb") as file:
            data = file.read(_LONGEST + 1)
        if len(data) > _LONGEST:
            raise FileFormatError(message(f"{path} is too long for a key or a signature"))
        return data.decode()
    except UnicodeDecodeError as error:
        raise FileFormatError(message(f"{path} is no text", "a file of minisign")) from error
    except OSError as error:
        if isinstance(error, FileFormatError):
            raise
        raise FileFormatError(message(f"cannot read {path}: {error.strerror}")) from error


def _second_line(path: Path) -> str:
    """Return the line of a key file that holds the key."""
    lines = _read(path).splitlines()
    if len(lines) < 2 or not lines[0].startswith("untrusted comment:"):
        raise FileFormatError(message(f"{path} is no key", "a key file of minisign: a comment and a line of base64"))
    return lines[1]
