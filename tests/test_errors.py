"""Every error of ours is caught by one base class and says what to do."""

import inspect

import pytest

from sparta import errors


def error_classes():
    return [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, Exception)]


@pytest.mark.parametrize("kind", error_classes())
def test_one_base_class_catches_all(kind):
    with pytest.raises(errors.SpartaError, match="plain text"):
        raise kind("plain text")


def test_errors_are_also_the_builtin_one_expects():
    assert issubclass(errors.ShapeError, ValueError)
    assert issubclass(errors.NameNotFoundError, KeyError)
    assert issubclass(errors.FileFormatError, OSError)
    assert issubclass(errors.MissingPackageError, ImportError)
    assert str(errors.NameNotFoundError("no quotes")) == "no quotes"


def test_unknown_names_get_the_closest_and_the_list():
    assert "did you mean 'channel'" in errors.did_you_mean("chanel", ["block", "channel"])
    assert "known: block, channel" in errors.did_you_mean("zzz", ["block", "channel"])
    assert "did you mean" not in errors.did_you_mean("zzz", ["block", "channel"])
    assert "(5 more)" in errors.did_you_mean("zzz", [f"name{i:02}" for i in range(25)])
    assert "no known" in errors.did_you_mean("zzz", [])
