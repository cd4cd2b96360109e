"""The packages that compiling and tuning need, looked for before long work begins.

An installation by pip has them all. In an environment put together by hand one may be missing; a compilation would then
give up step after step, name the package in its notes, and return a model that is no faster than before.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

from sparta.errors import MissingPackageError, message

__all__ = ["check_packages"]

# Import names, and the distributions they come in.
_NEEDED = {
    "numpy": "numpy",
    "optuna": "optuna",
    "pydantic": "pydantic",
    "safetensors": "safetensors",
    "filelock": "filelock",
    "platformdirs": "platformdirs",
}


def check_packages(what: str) -> None:
    """Raise unless the packages are installed that compiling and tuning need.

    Parameters
    ----------
    what
        Who needs them, for the error.

    Raises
    ------
    sparta.errors.MissingPackageError

    Examples
    --------
    >>> check_packages("sparta.compile")
    """
    missing = _missing()
    if missing:
        raise MissingPackageError(
            message(f"{what} needs {', '.join(missing)}, not installed here", fix=f"pip install {' '.join(missing)}")
        )


@cache
def _missing() -> tuple[str, ...]:
    return tuple(distribution for name, distribution in _NEEDED.items() if find_spec(name) is None)
