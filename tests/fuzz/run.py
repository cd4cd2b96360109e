"""Fuzz every reader for long: ``python tests/fuzz/run.py --count 20000``. The exit code is 1 if anything bad came up.

Prints a table of outcomes by kind of file, then each kind of bad outcome with one seed number that gives it.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzz.corpus import make_corpus
from fuzz.pool import BAD, fuzz, table


def main():
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--kinds", nargs="*", help="only these kinds of file")
    parser.add_argument("--keep", type=Path, help="folder for the files with a bad outcome")
    options = parser.parse_args()
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
    started, findings = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        corpus = make_corpus(Path(folder))
        for one in fuzz(corpus, options.count, options.seed, options.workers, options.keep, options.kinds):
            findings.append(one)
            if len(findings) % 1000 == 0:
                bad = sum(found.outcome in BAD for found in findings)
                print(f"{len(findings)} files, {bad} bad, {time.monotonic() - started:.0f} s", flush=True)
    print(table(findings))
    seen = {}
    for one in findings:
        if one.outcome in BAD:
            seen.setdefault((one.kind, one.outcome, one.detail[:60]), []).append(one)
    for (kind, outcome, _), ones in sorted(seen.items()):
        print(f"{kind} {outcome} x{len(ones)}, number {ones[0].number} of {ones[0].source}: {ones[0].detail}")
    return int(bool(seen))


if __name__ == "__main__":
    sys.exit(main())
