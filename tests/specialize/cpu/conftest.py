"""One folder of compiled kernels for all tests of a run, so that each instruction set is compiled once."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def _shared_libraries(tmp_path_factory):
    base = tmp_path_factory.getbasetemp()
    # Workers of pytest-xdist have folders of their own side by side; the libraries go next to them.
    shared = base.parent if base.name.startswith("popen-") else base
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARTA_CACHE", str(shared / "sparta-cache"))
        yield
