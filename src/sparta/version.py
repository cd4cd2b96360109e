"""The version of the package, read from its installed metadata so that it is written in one place only."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

__all__ = ["__version__"]

try:
    __version__ = version("sparta-torch")
except PackageNotFoundError:  # a source tree on the path, not installed
    __version__ = "0+source"
