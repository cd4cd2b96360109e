"""Ed25519 signatures (RFC 8032), in whole numbers of Python.

The formulas are those of the standard: points of a twisted Edwards curve in extended coordinates, where adding needs no
exceptions. Checking a signature handles nothing secret. Signing takes a time that depends on the key, so sign where
nobody measures.
"""

from __future__ import annotations

import hashlib

__all__ = ["public_key", "sign", "verified"]

_P = 2**255 - 19
_ORDER = 2**252 + 27742317777372353535851937790883648493
_D = -121665 * pow(121666, -1, _P) % _P
_ROOT_OF_MINUS_ONE = pow(2, (_P - 1) // 4, _P)

Point = tuple[int, int, int, int]
"""X, Y, Z and T of a point: x = X / Z, y = Y / Z, x y = T / Z."""
_NEUTRAL: Point = (0, 1, 1, 0)


def public_key(seed: bytes) -> bytes:
    """Return the 32 bytes that check what 32 secret bytes sign.

    >>> public_key(bytes(32)).hex()[:16]
    '3b6a27bcceb6a42d'
    """
    scalar, _ = _secret(seed)
    return _encoded(_times(scalar, _BASE))


def sign(seed: bytes, text: bytes) -> bytes:
    """Return the 64 bytes that sign a text; the same for the same key and text.

    >>> verified(public_key(bytes(32)), b"text", sign(bytes(32), b"text"))
    True
    """
    scalar, prefix = _secret(seed)
    public = _encoded(_times(scalar, _BASE))
    nonce = _number(prefix, text) % _ORDER
    first = _encoded(_times(nonce, _BASE))
    last = (nonce + _number(first, public, text) * scalar) % _ORDER
    return first + last.to_bytes(32, "little")


def verified(public: bytes, text: bytes, signature: bytes) -> bool:
    """Return whether 64 bytes are the signature of a text by a key; keys and numbers of a wrong form never are."""
    if len(public) != 32 or len(signature) != 64:
        return False
    point = _decoded(public)
    last = int.from_bytes(signature[32:], "little")
    if point is None or last >= _ORDER or _is_neutral(_times(8, point)):
        return False  # a point of small order signs everything
    challenge = _number(signature[:32], public, text) % _ORDER
    found = _sum(_times(last, _BASE), _times(challenge, _negative(point)))
    return _encoded(found) == signature[:32]


def _secret(seed: bytes) -> tuple[int, bytes]:
    """Return the secret scalar of a key, and what its nonces are made of."""
    digest = hashlib.sha512(seed).digest()
    scalar = int.from_bytes(digest[:32], "little")
    return scalar & (2**254 - 8) | 2**254, digest[32:]


def _number(*parts: bytes) -> int:
    return int.from_bytes(hashlib.sha512(b"".join(parts)).digest(), "little")


def _sum(one: Point, other: Point) -> Point:
    x1, y1, z1, t1 = one
    x2, y2, z2, t2 = other
    a, b = (y1 - x1) * (y2 - x2) % _P, (y1 + x1) * (y2 + x2) % _P
    c, d = 2 * t1 * t2 * _D % _P, 2 * z1 * z2 % _P
    e, f, g, h = b - a, d - c, d + c, b + a
    return e * f % _P, g * h % _P, f * g % _P, e * h % _P


def _negative(point: Point) -> Point:
    x, y, z, t = point
    return _P - x, y, z, _P - t


def _times(scalar: int, point: Point) -> Point:
    result = _NEUTRAL
    for bit in f"{scalar:b}":
        result = _sum(result, result)
        if bit == "1":
            result = _sum(result, point)
    return result


def _is_neutral(point: Point) -> bool:
    x, y, z, _ = point
    return x % _P == 0 and (y - z) % _P == 0


def _encoded(point: Point) -> bytes:
    x, y, z, _ = point
    inverse = pow(z, -1, _P)
    odd = x * inverse % _P & 1
    return (y * inverse % _P | odd << 255).to_bytes(32, "little")


def _decoded(data: bytes) -> Point | None:
    """Return the point that 32 bytes stand for; None where there is none, or where it has a shorter form."""
    number = int.from_bytes(data, "little")
    odd, y = number >> 255, number & (2**255 - 1)
    if y >= _P:
        return None
    square = (y * y - 1) * pow(_D * y * y + 1, -1, _P) % _P
    x = pow(square, (_P + 3) // 8, _P)
    if x * x % _P != square:
        x = x * _ROOT_OF_MINUS_ONE % _P
    if x * x % _P != square or (x == 0 and odd):
        return None
    x = _P - x if x & 1 != odd else x
    return x, y, 1, x * y % _P


def _base() -> Point:
    found = _decoded((4 * pow(5, -1, _P) % _P).to_bytes(32, "little"))
    assert found is not None  # noqa: S101 - the base point of the standard
    return found


_BASE = _base()
