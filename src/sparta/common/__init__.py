"""What several layers of the package share: search spaces and the search over them, in :mod:`sparta.common.tuning`."""
