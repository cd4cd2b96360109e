"""The walk over the zoo: models have processes of their own, and what ends badly costs its own row alone."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def pool(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import processes

    yield processes.Pool
    sys.modules.pop("processes", None)


def doubled(number):
    return 2 * number


def failing():
    raise ValueError("no such number")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_ends_badly_costs_its_own_answer(pool):
    work = pool(workers=4, limit=3.0)
    work.add("right", "fork", doubled, 4)
    work.add("raises", "fork", failing)
    work.add("crashes", "fork", os.abort)
    work.add("late", "fork", time.sleep, 60)
    answers = {}
    for key, answer in work.answers():
        answers[key] = answer
        if key == "right":
            work.add("next", "fork", doubled, answer)
    assert (answers["right"], answers["next"]) == (8, 16)
    assert "no such number" in answers["raises"].how
    assert "ended with" in answers["crashes"].how
    assert "more than 3 s" in answers["late"].how


@pytest.mark.parametrize("script", ["propagate", *(["compiler"] if os.environ.get("SPARTA_LONG") else [])])
def test_a_model_has_a_row(script, tmp_path):
    command = [sys.executable, BENCHMARKS / script / "all_models.py", "--out", tmp_path, "--workers", "1", "--sources"]
    done = subprocess.run([*command, "couplings", "--only", "gated units"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*.json")
    (row,) = json.loads(path.read_text())["results"]["models"]
    assert "failed" not in row
    assert max(row["error"], row["any_batch"], row["loaded"]) < 1e-5
    assert row["kept"] < 1
