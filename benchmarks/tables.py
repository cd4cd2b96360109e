"""Tables in the documentation, made from the results in ``benchmarks/results``: ``python benchmarks/tables.py``.

A page marks where a table goes with ``<!-- table: NAME -->`` and ``<!-- end table -->``, each on a line of its own;
what stands between them is rewritten. With ``--check`` nothing is written, and a page that no longer agrees with the
results is an error. A new table is one function with ``@renderer("NAME", "question")`` in a file of ``renderers/``.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from renderers import (
    any_model,
    compiler,
    cpu,
    cuda,
    cuda_few,
    cuda_models,
    front_page,
    generation,
    noise,
    oneshot,
    propagation,
    training,
)
from renderers.registry import RENDERERS, Record

_USED = (
    any_model,
    compiler,
    cpu,
    cuda,
    cuda_few,
    cuda_models,
    front_page,
    generation,
    noise,
    oneshot,
    propagation,
    training,
)  # fill the registry
ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
REGION = re.compile(
    r"^(?P<begin><!-- table: (?P<name>[\w-]+) -->\n)(?P<body>.*?)^(?P<end><!-- end table -->)$",
    re.MULTILINE | re.DOTALL,
)


def records(question: str, folder: Path = RESULTS) -> list[Record]:
    """Return the saved results of one question, in the order of the devices' names."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{question}.*.json"))]


def made(name: str, folder: Path = RESULTS) -> str:
    """Return what belongs into the region `name`."""
    if name not in RENDERERS:
        raise SystemExit(f"no renderer makes the table {name!r}; there are: {', '.join(sorted(RENDERERS))}")
    question, render = RENDERERS[name]
    found = records(question, folder)
    return render(found) if found else "Not measured yet."


def rewritten(text: str, folder: Path = RESULTS) -> str:
    """Return the text of a page with all its tables made again."""

    def region(found: re.Match[str]) -> str:
        return f"{found['begin']}\n{made(found['name'], folder)}\n\n{found['end']}"

    return REGION.sub(region, text)


def pages() -> list[Path]:
    """Return the pages that may have tables: the README and the documentation."""
    built = ROOT / "docs" / "_build"
    return [page for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if built not in page.parents]


def main() -> int:
    """Rewrite the pages, or say which do not agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a page is out of date")
    options = parser.parse_args()
    stale = []
    for page in pages():
        before = page.read_text()
        after = rewritten(before)
        if before != after:
            stale.append(page)
            if not options.check:
                page.write_text(after)
    for page in stale:
        print(f"{'out of date' if options.check else 'rewritten'}: {page.relative_to(ROOT)}")
    return int(options.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
