"""The ``sparta`` command: a thin face on the library, for a person at a terminal.

Each command is one file: it calls one public function and prints what it returns, as a table or with ``--json``
as data. Importing a file adds its command.
"""

from sparta.cli import bench, compile, demo, env, inspect, plan, prune, recipe, report, train, tune  # noqa: A004, F401 - they add their commands
from sparta.cli.console import app, main

__all__ = ["app", "main"]
