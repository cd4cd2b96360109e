"""Signing: who wrote a file? Keys and signatures of the minisign tool, made and checked without it.

``fast.save(path, sign=key)`` writes ``path.minisig`` beside the file, and ``sparta.load(path, key=...)`` refuses a file
of which one byte is not as the owner of the key signed it. A checksum guards against accidents, a signature against
other authors.
"""

from sparta.arguments import front_door
from sparta.signing.minisign import PublicKey, SigningKey, signature_path, signer, verifier, verify

__all__ = ["PublicKey", "SigningKey", "signature_path", "signer", "verifier", "verify"]

front_door(
    globals(),
    __all__,
    ["PublicKey.of", "PublicKey.save", "SigningKey.of", "SigningKey.load", "SigningKey.save", "SigningKey.signature"],
)
