"""What people add from outside the package is one file and one registration, and works end to end.

Each toy runs in a process of its own: what it registers would be there for the other tests too. The processes come from
one that has imported the package already.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TOYS = sorted(path.stem for path in HERE.glob("toy_*.py"))
ALL = """
import json, os, sys, traceback
import torch, sparta.compiler, sparta.create, sparta.propagation, sparta.scheduler
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[1])
found = {}
for toy in sys.argv[2:]:
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            __import__(toy).main()
        except BaseException:
            os.write(write, traceback.format_exc()[-3000:].encode())
            os._exit(1)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as told:
        text = told.read()
    found[toy] = (os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text)
print(json.dumps(found))
"""


def test_all_six_kinds_are_here():
    kinds = ("implement", "lowering", "modifier", "pattern", "rule", "scheduler")
    assert [f"toy_{kind}" for kind in kinds] == TOYS


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARTA_CACHE", str(tmp_path_factory.mktemp("cache")))
        command = [sys.executable, "-c", ALL, str(HERE), *TOYS]
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("toy", TOYS)
def test_one_file_and_one_registration_are_enough(toy, outcomes):
    code, told = outcomes[toy]
    assert code == 0, told
