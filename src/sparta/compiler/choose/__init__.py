"""The steps that search: partition, layers, calls, precision, the whole end to end, and what was decided."""
