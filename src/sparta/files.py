"""Files: written atomically, checked on load, never pickled.

A file of ours is a safetensors file whose metadata holds the kind of file, its format version, a JSON payload and a
SHA-256 over everything else. Writing goes to a temporary file that is flushed to disk and then renamed, so a reader
sees the old file or the new one and never half of either. A checksum is no proof of good will, so readers trust
nothing: JSON is read by :func:`read_json`, sizes go through a :class:`Budget`, and :func:`reading` turns whatever a bad
file sets off into a :class:`~sparta.errors.FileFormatError` that names the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from sparta.errors import FileFormatError, SpartaError, message

__all__ = [
    "Budget",
    "load_tensors",
    "private_folder",
    "read_json",
    "read_json_file",
    "reading",
    "save_tensors",
    "write_atomic",
]

_HEADER_LIMIT = 512 * 1024 * 1024
_DEEPEST = 100  # lists and objects of JSON within each other; what we write has fewer than 20
_GROWTH, _LEAST_BUDGET = 64, 64 * 1024 * 1024  # a mask of one bit per element is a 32nd of the tensor in float32
_TEMPORARY = re.compile(r"\..*\.sparta-([0-9a-f]{8})-([0-9]{1,9})-.+")
_ABANDONED_SECONDS = 3600.0


def write_atomic(path: str | os.PathLike[str], data: bytes, *, private: bool = False) -> None:
    """Write `data` to `path` so that a crash or a reader at any moment finds the old file or the new one whole.

    A private file can be read by its owner alone.
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise FileFormatError(message(f"cannot write {target}: its folder does not exist", fix="create it first"))
    try:
        _replace(target, data, private=private)
    except FileFormatError:
        raise
    except OSError as error:
        given = f"cannot write {target}: {error.strerror or error}"
        raise FileFormatError(message(given, fix="make room, or write where it is allowed")) from error
    _sync_folder(target.parent)


def _replace(target: Path, data: bytes, *, private: bool) -> None:
    """Write a temporary file beside the target, and put it in its place."""
    if target.is_dir():
        raise FileFormatError(message(f"cannot write {target}: it is a folder", fix="name a file in it"))
    _sweep(target.parent)
    prefix = f".{target.name[:100]}.sparta-{_host()}-{os.getpid()}-"
    handle, temporary = tempfile.mkstemp(prefix=prefix, dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if not private:
            _use_default_permissions(temporary)
        os.replace(temporary, target)  # noqa: PTH105 - atomic also over an existing file
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            Path(temporary).unlink()
        raise


def private_folder(name: str) -> Path:
    """Return the folder `name` of this user's cache, made if it is not there, in which no one else can write.

    The cache lies in ``$SPARTA_CACHE``, by default where the system keeps caches: ``$XDG_CACHE_HOME/sparta`` or
    ``~/.cache/sparta`` on Linux. A folder that belongs to someone else, or that
    others may write to, is refused: what lies in it could have been planted.
    """
    from platformdirs import user_cache_path

    named = os.environ.get("SPARTA_CACHE", "").strip()
    root = Path(named).expanduser() if named else user_cache_path("sparta", appauthor=False)
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
    *,
    written: Callable[[bytes], object] | None = None,
) -> None:
    """Save tensors and a JSON payload as one checked safetensors file.

    Parameters
    ----------
    kind
        What the file is, such as ``"spec"``; :func:`load_tensors` refuses a file of another kind.
    version
        Format version of that kind; a reader refuses files newer than it knows.
    written
        Called with all bytes of the file when it is there, to sign them.
    """
    from safetensors.torch import save

    metadata = {"sparta": kind, "version": str(version), "payload": json.dumps(payload, sort_keys=True)}
    plain = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    header, body = _split(save(plain, metadata), Path(path))
    header["__metadata__"]["sha256"] = _digest(header, body)
    text = json.dumps(header, sort_keys=True).encode()
    text += b" " * (-len(text) % 8)
    data = b"".join((len(text).to_bytes(8, "little"), text, body))
    write_atomic(path, data)
    if written is not None:
        written(data)


def load_tensors(
    path: str | os.PathLike[str], kind: str, version: int, *, trusted: Callable[[bytes], object] | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Load what :func:`save_tensors` wrote; raises :class:`FileFormatError` unless every byte is as written.

    Parameters
    ----------
    trusted
        Called with all bytes before any of them is looked at; raises where the file is not to be trusted.

    Returns
    -------
    tuple
        The tensors by name, and the payload.
    """
    from safetensors.torch import load

    file = Path(path)
    with reading(file):
        data = _read(file)
        if trusted is not None:
            trusted(data)
        header, body = _split(data, file)
        metadata = header.get("__metadata__", {})
        found = metadata.get("sparta")
        if found != kind:
            what = f"a sparta {found} file" if isinstance(found, str) else "not a sparta file"
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
        payload = read_json(metadata["payload"], str(file))
        if not isinstance(payload, dict):
            raise FileFormatError(message(f"{file} holds {type(payload).__name__}", "an object", "save it again"))
        return load(data), payload


def kind_of(path: str | os.PathLike[str]) -> str | None:
    """Return what kind of file this says it is, from its header alone; None where it does not say.

    >>> kind_of("no such file") is None
    True
    """
    try:
        with Path(path).open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            there = os.fstat(file.fileno()).st_size - 8  # a buffer is made for what is asked for, not for what there is
            header = read_json(file.read(max(0, min(size, there, _HEADER_LIMIT))), str(path))
        found = header["__metadata__"]["sparta"]
    except (OSError, ValueError, KeyError, TypeError, FileFormatError):
        return None
    return found if isinstance(found, str) else None


@contextlib.contextmanager
def reading(path: str | os.PathLike[str], fix: str = "save it again") -> Iterator[None]:
    """Turn whatever the contents of a bad file set off inside the block into a FileFormatError that names the file.

    >>> with reading("model.sparta"):
    ...     {}["graph"]
    Traceback (most recent call last):
    sparta.errors.FileFormatError: model.sparta lacks the entry 'graph'; save it again.
    """
    name = os.fspath(path)
    try:
        yield
    except SpartaError as error:
        if isinstance(error, FileFormatError) and name in str(error):
            raise
        raise FileFormatError(f"{name}: {error}") from error
    except (OSError, ImportError):
        raise  # nothing that the contents are to blame for
    except Exception as error:  # the packages that build models have errors of their own
        what = f"does not fit together ({type(error).__name__}: {error}"[:500] + ")"
        given = f"{name} lacks the entry {error}"[:500] if isinstance(error, KeyError) else f"{name} {what}"
        raise FileFormatError(message(given, fix=fix)) from error


def read_json(text: str | bytes, source: str) -> Any:
    """Return what a JSON text of a stranger holds; refuses one that is nested deeply or gives a key twice.

    Parameters
    ----------
    source
        What error messages call it: the name of its file.

    Examples
    --------
    >>> read_json('{"a": [1, 2.5, null]}', "a file")
    {'a': [1, 2.5, None]}
    """
    if not isinstance(text, str | bytes):
        raise FileFormatError(message(f"{source} has {type(text).__name__} for JSON", "a text", "write it again"))
    try:
        found = json.loads(text, object_pairs_hook=_object)
    except RecursionError as error:
        raise _too_deep(source) from error
    except ValueError as error:
        raise FileFormatError(message(f"{source} is not valid JSON: {error}", fix="write it again")) from error
    level, depth = [found], 0
    while level := [inner for value in level if isinstance(value, dict | list) for inner in _inside(value)]:
        depth += 1
        if depth > _DEEPEST:
            raise _too_deep(source)
    return found


def read_json_file(path: str | os.PathLike[str]) -> Any:
    """Return what a JSON file of a stranger holds, as :func:`read_json` does; a missing file is FileNotFoundError."""
    return read_json(Path(path).read_bytes(), os.fspath(path))


class Budget:
    """How many bytes may be made from one file: 64 times its size, 64 MiB at least, or what the caller allows.

    A file can say in a few bytes that a tensor is huge, so every tensor that is larger than what the file holds of it
    is asked for here before it is made.

    Parameters
    ----------
    limit
        In bytes.
    source
        What error messages call it: the name of the file.

    Examples
    --------
    >>> budget = Budget(1000, "m.sparta")
    >>> budget.take((10, 10), 4, "the mask")
    100
    >>> budget.take((10, 20), 4, "the weight")
    Traceback (most recent call last):
    sparta.errors.FileFormatError: m.sparta: the weight of shape (10, 20) takes 800 bytes; allowed: 600 bytes more; ...
    """

    def __init__(self, limit: int, source: str) -> None:
        self.limit, self.source, self._taken = limit, source, 0

    @classmethod
    def of_file(cls, path: str | os.PathLike[str], max_bytes: int | None = None) -> Budget:
        """Return the budget of a file that exists; `max_bytes` replaces the one that follows from its size."""
        size = Path(path).stat().st_size
        return cls(max(_LEAST_BUDGET, _GROWTH * size) if max_bytes is None else max_bytes, os.fspath(path))

    def check(self, shape: Sequence[int], itemsize: int, what: str) -> int:
        """Return how many elements `shape` has; raises FileFormatError if it is no shape or too large by itself."""
        count = 1
        for size in shape:
            if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size < 2**62:
                raise FileFormatError(
                    message(
                        f"{self.source}: {what} has the size {size!r}", "whole numbers of 0 or more", "save it again"
                    )
                )
            count *= size
        left = self.limit - self._taken
        if count * itemsize > left:
            given = f"{self.source}: {what} of shape {tuple(shape)} takes {count * itemsize} bytes"
            raise FileFormatError(message(given, f"{left} bytes more", "pass max_bytes if you trust the file"))
        return count

    def take(self, shape: Sequence[int], itemsize: int, what: str) -> int:
        """Do as :meth:`check` does, and count the bytes: the next tensor has so much less."""
        count = self.check(shape, itemsize, what)
        self._taken += count * itemsize
        return count


def _inside(value: dict[str, Any] | list[Any]) -> Iterator[Any]:
    return iter(value.values() if isinstance(value, dict) else value)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is given twice")
    return found


def _too_deep(source: str) -> FileFormatError:
    return FileFormatError(
        message(f"{source} has JSON that is nested too deeply", f"{_DEEPEST} levels at most", "write it again")
    )


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise FileFormatError(message(f"cannot read {file}: {error.strerror}", fix="check the path")) from error


def _split(data: bytes, file: Path) -> tuple[dict[str, Any], memoryview]:
    """Split a safetensors file into its header and its body."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > min(_HEADER_LIMIT, len(data) - 8):
        raise FileFormatError(message(f"{file} is truncated or not a safetensors file", fix="save it again"))
    header = read_json(data[8 : 8 + size], f"the header of {file}")
    if not isinstance(header, dict) or not isinstance(header.get("__metadata__", {}), dict):
        raise FileFormatError(message(f"{file} has a damaged header", fix="save it again"))
    return header, memoryview(data)[8 + size :]


def _digest(header: Mapping[str, Any], body: memoryview) -> str:
    sha = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    sha.update(body)
    return sha.hexdigest()


def _version_of(metadata: Mapping[str, Any], file: Path) -> int:
    text = metadata.get("version", "")
    if not isinstance(text, str) or not re.fullmatch("[0-9]{1,9}", text):
        raise FileFormatError(message(f"{file} has the format version {text!r}", "a whole number", "save it again"))
    return int(text)


def _host() -> str:
    """Return what tells this machine's (or container's) process numbers from those of others, as 8 digits."""
    space = "/proc/self/ns/pid"
    parts = f"{platform.node()} {os.readlink(space) if Path(space).is_symlink() else ''}"  # noqa: PTH115 - no real path
    return hashlib.sha256(parts.encode()).hexdigest()[:8]


def _sweep(folder: Path) -> None:
    """Remove the temporary files of writers that were killed; whatever cannot be removed stays."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            found = _TEMPORARY.fullmatch(entry.name)
            if found is None:
                continue
            with contextlib.suppress(OSError):
                if _is_abandoned(found[1], int(found[2]), entry.stat(follow_symlinks=False).st_mtime):
                    Path(entry.path).unlink()


def _is_abandoned(host: str, process: int, written: float) -> bool:
    """Tell whether the writer of a temporary file is gone: it is not running here, or elsewhere for an hour now."""
    if os.name != "posix" or host != _host():
        return time.time() - written > _ABANDONED_SECONDS
    try:
        os.kill(process, 0)  # asks only
    except ProcessLookupError:
        return True
    except OSError:
        return False  # another user's
    return False


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
