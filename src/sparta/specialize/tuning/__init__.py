"""From a search space to a choice: measuring, significance, the store and the shipped tables."""
