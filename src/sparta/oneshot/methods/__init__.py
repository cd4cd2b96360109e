"""Methods: one file each, registered by name; all take a problem of one layer and return a mask and weights."""

from sparta.oneshot.methods.alps import alps
from sparta.oneshot.methods.base import Method, find_method, method, method_names
from sparta.oneshot.methods.least_squares import exact_fit, refit
from sparta.oneshot.methods.magnitude import magnitude
from sparta.oneshot.methods.obc import obc, obc_path
from sparta.oneshot.methods.ria import ria
from sparta.oneshot.methods.sparsegpt import sparsegpt
from sparta.oneshot.methods.swaps import improve, swaps
from sparta.oneshot.methods.wanda import wanda

__all__ = [
    "Method",
    "alps",
    "exact_fit",
    "find_method",
    "improve",
    "magnitude",
    "method",
    "method_names",
    "obc",
    "obc_path",
    "refit",
    "ria",
    "sparsegpt",
    "swaps",
    "wanda",
]
