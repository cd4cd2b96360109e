"""Soak: ``python tests/soak/run.py --seconds 1800``. The exit code is 1 if an answer was wrong or memory grew."""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from soak.serve import Soak


def main():
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sparta-soak-") as folder:
        outcome = Soak(folder, seconds=options.seconds, threads=options.threads, seed=options.seed).run()
    print(outcome)
    for line in outcome.failures[:20]:
        print(line)
    return int(bool(outcome.failures))


if __name__ == "__main__":
    sys.exit(main())
