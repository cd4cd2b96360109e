"""Toys register themselves where they are imported, so the collection of doctests leaves them alone."""

collect_ignore_glob = ["toy_*.py"]
