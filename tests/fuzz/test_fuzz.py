"""A short run of the fuzzer over every kind of file: whatever it holds, it is read, or refused by an error of ours."""

import sys

import pytest

from fuzz.corpus import make_corpus
from fuzz.pool import BAD, Reader, fuzz, table

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits and /proc are those of Linux")

FILES = 168


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


def test_no_file_does_anything_but_load_or_be_refused(corpus):
    findings = list(fuzz(corpus, FILES, seed=1))
    assert len(findings) == FILES
    bad = [one for one in findings if one.outcome in BAD]
    assert not bad, f"{table(findings)}\n" + "\n".join(map(str, bad[:5]))
    assert {one.outcome for one in findings} >= {"loaded", "refused"}


HOLES = {
    "import os; os.system('true')": "execution",
    "import subprocess; subprocess.run(['true'])": "execution",
    "import sparta_fuzz_canary": "execution",
    "eval('sparta_fuzz_canary + 1')": "execution",
    "open('sparta_fuzz_canary', 'a').close()": "execution",
    "import torch; torch.zeros(2**31)": "memory",
    "bytearray(2**31)": "memory",
    "{}['a']": "foreign",
    "raise sparta.errors.SpartaError('no')": "refused",
    "1 + 1": "loaded",
    "import os; os.kill(os.getpid(), 11)": "signal",
    "import time; time.sleep(600)": "time-out",
}


def test_the_fuzzer_sees_what_it_is_to_see(tmp_path, monkeypatch):
    """A reader that runs its file as a program stands for one with holes."""
    hole = (
        "import sys; from fuzz import reader; import sparta, torch\n"
        "def hole(path):\n    exec(path.read_text())\n    return 'loaded'\n"
        "reader.READERS['hole'] = hole; reader.main()"
    )
    program, reader, found = tmp_path / "hole.py", Reader(tmp_path, [], ["-c", hole]), {}
    try:
        for line, outcome in HOLES.items():
            program.write_text(line)
            if outcome == "time-out":
                monkeypatch.setattr("fuzz.pool.SECONDS", 5)
            found[line] = reader.read("hole", program)[0]
    finally:
        reader.close()
    assert found == HOLES
