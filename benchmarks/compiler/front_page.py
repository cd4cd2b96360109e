"""What do the first samples of the README and of the quickstart print? They are run, and the reports kept.

Run with ``python benchmarks/compiler/front_page.py`` on a quiet machine (under a minute). The samples are read from the
pages themselves, so a page shows what its own lines print.
"""

from __future__ import annotations

import contextlib
import io
import os
import platform
import re
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import save

ROOT = Path(__file__).parents[2]
PAGES = {"readme": "README.md", "quickstart": "docs/start/quickstart.md"}
SAMPLE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def printed(page: str) -> str:
    """Run the samples of a page up to the one that prints a report; return that report."""
    names: dict[str, object] = {}
    for sample in SAMPLE.findall((ROOT / page).read_text("utf-8")):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(sample, page, "exec"), names)  # noqa: S102 - our own documentation
        if "print(fast.report)" in sample:
            return out.getvalue().strip()
    raise SystemExit(f"{page} prints no report")


def main() -> None:
    """Run both pages and save what they print."""
    results = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for name, page in PAGES.items():
            results[name] = printed(page)
            print(results[name], "\n")
    facts = {"reports": results, "load": os.getloadavg()[0]}
    print(save("front_page", f"{platform.machine()} cpu", facts))


if __name__ == "__main__":
    main()
