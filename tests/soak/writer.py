"""The second process of a soak: it compiles the model and saves it to the file that is served, over and over."""

import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from soak.serve import compiled, pruned_model


def main():
    """Write until killed."""
    model = pruned_model()
    for turn in itertools.count():  # kernels as they are chosen, and sparse ones whatever the machine says of them
        compiled(model, 1.0, forced=turn % 2 == 0).save(sys.argv[1])
        print("saved", flush=True)


if __name__ == "__main__":
    main()
