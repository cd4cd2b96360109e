"""Images and labels for the training benchmarks, all of them on the device at once.

Without a folder these are the 1,797 digits of 8 x 8 pixels that come with scikit-learn. With one they are MNIST's
70,000 of 28 x 28: either its four original files (``train-images-idx3-ubyte`` and so on, also with ``.gz``), which
collections of data sets and package registries of several languages carry, or one ``mnist.npz`` with the same four
arrays. Fashion-MNIST is one ``fashion.npz`` beside them with the same four arrays. Nothing is downloaded, and data sets
are never committed. Other data in the same format works under these names.
"""

from __future__ import annotations

import gzip
import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

FILES = {
    "train_images": "train-images-idx3-ubyte",
    "train_labels": "train-labels-idx1-ubyte",
    "test_images": "t10k-images-idx3-ubyte",
    "test_labels": "t10k-labels-idx1-ubyte",
}


@dataclass(frozen=True)
class Images:
    """A data set: images of shape (N, 1, H, W) with mean 0 and spread 1, and their classes."""

    name: str
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def names_of_data(folder: Path | None) -> list[str]:
    """Return the data sets that there are in `folder`; the digits without one."""
    if folder is None:
        return ["digits"]
    return ["mnist", "fashion"] if (folder / "fashion.npz").exists() else ["mnist"]


def load(folder: Path | None, device: str, name: str | None = None, images: int | None = None) -> Images:
    """Return a data set of `folder` on `device`: the first one unless named, its first so many images to train with."""
    name = name or names_of_data(folder)[0]
    arrays = _arrays(folder, name)
    pixels = {kind: torch.from_numpy(arrays[f"{kind}_images"].astype(np.float32)) for kind in ("train", "test")}
    mean, spread = pixels["train"].mean(), pixels["train"].std()
    ready = {kind: ((image - mean) / spread).unsqueeze(1).to(device) for kind, image in pixels.items()}
    labels = {
        kind: torch.from_numpy(arrays[f"{kind}_labels"].astype(np.int64)).to(device) for kind in ("train", "test")
    }
    whole = Images(name, ready["train"], labels["train"], ready["test"], labels["test"])
    return replace(whole, train_images=whole.train_images[:images], train_labels=whole.train_labels[:images])


def _arrays(folder: Path | None, name: str) -> dict[str, np.ndarray]:
    if folder is None:
        return _digits()
    path = folder / f"{name}.npz"
    return _packed(path) if path.exists() else _idx(folder)


def _digits() -> dict[str, np.ndarray]:
    from sklearn.datasets import load_digits

    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    test, train = order[:360], order[360:]
    return {
        "train_images": found.images[train],
        "train_labels": found.target[train],
        "test_images": found.images[test],
        "test_labels": found.target[test],
    }


def _packed(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as arrays:
        return {key: arrays[key] for key in FILES}


def _idx(folder: Path) -> dict[str, np.ndarray]:
    found = {}
    for key, name in FILES.items():
        path = next((p for p in (folder / name, folder / f"{name}.gz") if p.exists()), None)
        if path is None:
            raise SystemExit(f"{folder} has neither mnist.npz nor {name}: pass the folder with MNIST's four idx files")
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        dims = content[3]  # two zero bytes, the type, the number of dims, then each size as four bytes
        shape = [int.from_bytes(content[4 + 4 * dim : 8 + 4 * dim], "big") for dim in range(dims)]
        if content[:3] != b"\0\0\x08" or len(content) != 4 + 4 * dims + math.prod(shape):
            raise SystemExit(f"{path} is not a whole idx file of bytes")
        found[key] = np.frombuffer(content, np.uint8, offset=4 + 4 * dims).reshape(shape)
    return found
