"""The second process of a soak: it compiles the model and saves it to the file that is served, over and over."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from soak.serve import compiled, pruned_model


def main():
    """Write until killed."""
    model = pruned_model()
    while True:
        compiled(model, 1.0).save(sys.argv[1])
        print("saved", flush=True)


if __name__ == "__main__":
    main()
