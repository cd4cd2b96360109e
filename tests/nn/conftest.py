"""What tests of modules measure is kept in a store of each test's own."""

import pytest


@pytest.fixture(autouse=True)
def own_store(tmp_path, monkeypatch):
    """Give each test an empty tuning store; compiled kernels stay where they are."""
    folder = tmp_path / "tuning"
    folder.mkdir()
    monkeypatch.setattr("sparta.specialize.tuning.store.private_folder", lambda _name: folder)
    return folder
