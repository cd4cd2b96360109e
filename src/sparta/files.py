"""Files: written atomically, checked on load, never pickled.

A file of ours is a safetensors file whose metadata holds the kind of file, its format version, a JSON payload and a
SHA-256 over everything else. The one idea to know: writing goes to a temporary file that is flushed to disk and then
renamed, so a reader sees the old file or the new one and never half of either.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from sparta.errors import FileFormatError, message

__all__ = ["load_tensors", "private_folder", "save_tensors", "write_atomic"]

_HEADER_LIMIT = 512 * 1024 * 1024


def write_atomic(path: str | os.PathLike[str], data: bytes) -> None:
    """Write `data` to `path` so that a crash or a reader at any moment finds the old file or the new one whole."""
    target = Path(path)
    if not target.parent.is_dir():
        raise FileFormatError(message(f"cannot write {target}: its folder does not exist", fix="create it first"))
    handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        _use_default_permissions(temporary)
        os.replace(temporary, target)  # noqa: PTH105 - atomic also over an existing file
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            Path(temporary).unlink()
        raise
    _sync_folder(target.parent)


def private_folder(name: str) -> Path:
    """Return the folder `name` of this user's cache, made if it is not there, in which no one else can write.

    The cache lies in ``$SPARTA_CACHE``, by default ``~/.cache/sparta``. A folder that belongs to someone else, or that
    others may write to, is refused: what lies in it could have been planted.
    """
    named = os.environ.get("SPARTA_CACHE", "").strip()
    root = Path(named).expanduser() if named else Path.home() / ".cache" / "sparta"
    folder = root / name
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        for level in (root, folder):
            level.mkdir(mode=0o700, exist_ok=True)
            _refuse_shared(level)
    except OSError as error:
        if isinstance(error, FileFormatError):
            raise
        raise FileFormatError(
            message(f"cannot make the folder {folder}: {error.strerror}", fix="set SPARTA_CACHE to one you can write")
        ) from error
    return folder


def save_tensors(
    path: str | os.PathLike[str],
    kind: str,
    version: int,
    tensors: Mapping[str, Tensor],
    payload: Mapping[str, Any],
) -> None:
    """Save tensors and a JSON payload as one checked safetensors file.

    Parameters
    ----------
    kind
        What the file is, such as ``"spec"``; :func:`load_tensors` refuses a file of another kind.
    version
        Format version of that kind; a reader refuses files newer than it knows.
    """
    from safetensors.torch import save

    metadata = {"sparta": kind, "version": str(version), "payload": json.dumps(payload, sort_keys=True)}
    plain = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    header, body = _split(save(plain, metadata), Path(path))
    header["__metadata__"]["sha256"] = _digest(header, body)
    text = json.dumps(header, sort_keys=True).encode()
    text += b" " * (-len(text) % 8)
    write_atomic(path, len(text).to_bytes(8, "little") + text + body)


def load_tensors(path: str | os.PathLike[str], kind: str, version: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Load what :func:`save_tensors` wrote; raises :class:`FileFormatError` unless every byte is as written.

    Returns
    -------
    tuple
        The tensors by name, and the payload.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    file = Path(path)
    data = _read(file)
    header, body = _split(data, file)
    metadata = header.get("__metadata__", {})
    found = metadata.get("sparta")
    if found != kind:
        what = f"a sparta {found} file" if found else "not a sparta file"
        raise FileFormatError(message(f"{file} is {what}", f"a sparta {kind} file"))
    written = _version_of(metadata, file)
    if written > version:
        raise FileFormatError(
            message(f"{file} has format version {written}", f"up to {version}", "upgrade sparta to read it")
        )
    if metadata.pop("sha256", None) != _digest(header, body):
        raise FileFormatError(
            message(f"{file} is damaged or was edited: its checksum does not match", fix="save it again")
        )
    try:
        return load(data), json.loads(metadata["payload"])
    except (SafetensorError, KeyError, ValueError) as error:
        raise FileFormatError(message(f"{file} cannot be read: {error}", fix="save it again")) from error


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise FileFormatError(message(f"cannot read {file}: {error.strerror}", fix="check the path")) from error


def _split(data: bytes, file: Path) -> tuple[dict[str, Any], bytes]:
    """Split a safetensors file into its header and its body."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > min(_HEADER_LIMIT, len(data) - 8):
        raise FileFormatError(message(f"{file} is truncated or not a safetensors file", fix="save it again"))
    try:
        header = json.loads(data[8 : 8 + size])
    except ValueError as error:
        raise FileFormatError(message(f"{file} has a damaged header: {error}", fix="save it again")) from error
    if not isinstance(header, dict) or not isinstance(header.get("__metadata__", {}), dict):
        raise FileFormatError(message(f"{file} has a damaged header", fix="save it again"))
    return header, data[8 + size :]


def _digest(header: Mapping[str, Any], body: bytes) -> str:
    sha = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    sha.update(body)
    return sha.hexdigest()


def _version_of(metadata: Mapping[str, str], file: Path) -> int:
    text = metadata.get("version", "")
    if not text.isdigit():
        raise FileFormatError(message(f"{file} has the format version {text!r}", "a whole number", "save it again"))
    return int(text)


def _refuse_shared(folder: Path) -> None:
    """Raise unless `folder` is a real folder of this user that no one else can write."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise FileFormatError(message(f"{folder} is not a folder", fix="remove it or set SPARTA_CACHE"))
    if hasattr(os, "getuid") and status.st_uid != os.getuid():
        raise FileFormatError(message(f"{folder} belongs to another user", fix="set SPARTA_CACHE to a folder of yours"))
    if hasattr(os, "getuid") and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise FileFormatError(
            message(f"others may write to the folder {folder}", fix=f"run `chmod go-w {folder}` or set SPARTA_CACHE")
        )


def _use_default_permissions(path: str) -> None:
    """Give a temporary file (made readable by its owner alone) the permissions a plain new file would have."""
    umask = os.umask(0)
    os.umask(umask)
    Path(path).chmod(0o666 & ~umask)


def _sync_folder(folder: Path) -> None:
    """Flush the rename itself, where the system can."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
