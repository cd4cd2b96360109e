"""Call every op that a stored graph may name with hostile arguments, in processes of their own.

An op that ends the process (a signal) or does not come back is no op for strangers' files: it leaves the list in
`sparta.compiler.graph.allowed`. Run as ``python tests/fuzz/ops.py --trials 200``; the exit code is 1 if any op was
caught.
"""

import argparse
import json
import math
import random
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from sparta.compiler.graph.allowed import allowed_overloads, checked
from sparta.errors import SpartaError

SHAPES = [
    (),
    (0,),
    (1,),
    (3,),
    (2, 3),
    (4, 4),
    (2, 0),
    (2, 3, 4),
    (1, 3, 8, 8),
    (2, 4, 5, 5),
    (2, 3, 4, 5, 6),
    (1,) * 8,
]
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.int8,
]
DTYPES += [torch.bool, torch.complex64]
INTS = [0, 1, -1, 2, 3, 4, 5, -2, 7, 100, 2**31 - 1, -(2**31), 2**31, 2**62, -(2**63), 2**63 - 1]
FLOATS = [0.0, 1.0, -1.0, 0.5, 1e-300, 1e308, math.inf, -math.inf, math.nan]
INDICES = [0, 1, -1, 2, 5, 10**9, -(10**9), 2**62, -(2**63)]
TEXTS = [
    "",
    "none",
    "tanh",
    "mean",
    "sum",
    "same",
    "valid",
    "bilinear",
    "floor",
    "trunc",
    "ij",
    "xy",
    "ij,jk->ik",
    "i->ii",
]
TEXTS += ["constant", "reflect", "replicate", "circular", "amax", "prod", "left", "right", "...ij,...jk->...ik"]
SECONDS = 20


def _random(*shape):
    return lambda: torch.randn(shape)


def _just(value):
    return lambda: value


def _indices(*shape):
    return lambda: torch.zeros(shape, dtype=torch.int64)


def _conv(dims, *, transposed=False):
    numbers = {"stride": [1] * dims, "padding": [1] * dims, "dilation": [1] * dims, "groups": 2}
    fields = {"input": _random(2, 4, *[6] * dims), "weight": _random(4, 2, *[3] * dims), "bias": _random(4)}
    if transposed:
        numbers["output_padding"] = [0] * dims
    return fields | {name: _just(value) for name, value in numbers.items()}


def _pool(dims):
    numbers = {"kernel_size": [2] * dims, "stride": [2] * dims, "padding": [0] * dims, "ceil_mode": False}
    return {"self": _random(2, 4, *[6] * dims)} | {name: _just(value) for name, value in numbers.items()}


def _scatter(**more):
    return {"self": _random(4, 4), "dim": _just(0), "index": _indices(2, 3)} | more


def _recurrent(gates):
    def params():
        return [torch.randn(3 * gates, 4), torch.randn(3 * gates, 3), torch.randn(3 * gates), torch.randn(3 * gates)]

    flags = {"has_biases": True, "num_layers": 1, "dropout": 0.0, "train": False, "bidirectional": False}
    hidden = (lambda: [torch.randn(1, 2, 3)] * 2) if gates == 4 else _random(1, 2, 3)
    fields = {"input": _random(5, 2, 4), "hx": hidden, "params": params, "batch_first": _just(False)}
    return fields | {name: _just(value) for name, value in flags.items()}


RIGHT = {
    **{f"aten.conv{d}d.default": _conv(d) for d in (1, 2, 3)},
    "aten.conv_transpose1d.default": _conv(1, transposed=True),
    "aten.conv_transpose2d.input": _conv(2, transposed=True),
    "aten.conv_transpose3d.input": _conv(3, transposed=True),
    "aten.convolution.default": _conv(2, transposed=True) | {"transposed": _just(False)},
    **{f"aten.{kind}_pool{d}d.default": _pool(d) for d in (1, 2, 3) for kind in ("max", "avg")},
    **{
        f"aten.adaptive_{kind}_pool{d}d.default": {"self": _random(2, 3, *[6] * d), "output_size": _just([2] * d)}
        for d in (1, 2, 3)
        for kind in ("max", "avg")
    },
    **{
        f"aten.{kind}_pad{d}d.default": {"self": _random(2, 3, *[6] * d), "padding": _just([1] * (2 * d))}
        for d in (1, 2, 3)
        for kind in ("reflection", "replication")
    },
    "aten.constant_pad_nd.default": {"self": _random(2, 3, 4), "pad": _just([1, -1, 2, 0])},
    "aten.pad.default": {"self": _random(2, 3, 4), "pad": _just([1, 1]), "mode": _just("reflect")},
    "aten.upsample_nearest1d.default": {"self": _random(2, 3, 4), "output_size": _just([7])},
    "aten.upsample_nearest2d.default": {"self": _random(2, 3, 4, 4), "output_size": _just([7, 5])},
    "aten.upsample_nearest2d.vec": {
        "input": _random(2, 3, 4, 4),
        "output_size": _just(None),
        "scale_factors": _just([2.0, 1.5]),
    },
    "aten.upsample_bilinear2d.default": {
        "self": _random(2, 3, 4, 4),
        "output_size": _just([7, 5]),
        "align_corners": _just(False),
    },
    "aten.upsample_bicubic2d.default": {
        "self": _random(2, 3, 4, 4),
        "output_size": _just([7, 5]),
        "align_corners": _just(False),
    },
    "aten.upsample_trilinear3d.default": {
        "self": _random(2, 3, 4, 4, 4),
        "output_size": _just([7, 5, 3]),
        "align_corners": _just(False),
    },
    **{
        f"aten.grid_sampler_{d}d.default": {
            "input": _random(2, 3, *[5] * d),
            "grid": _random(2, *[4] * d, d),
            "interpolation_mode": _just(0),
            "padding_mode": _just(0),
            "align_corners": _just(False),
        }
        for d in (2, 3)
    },
    "aten.affine_grid_generator.default": {
        "theta": _random(2, 2, 3),
        "size": _just([2, 1, 4, 4]),
        "align_corners": _just(True),
    },
    "aten.embedding.default": {"weight": _random(5, 3), "indices": _indices(2, 2), "padding_idx": _just(-1)},
    "aten.gather.default": _scatter(),
    "aten.scatter.src": _scatter(src=_random(2, 3)),
    "aten.scatter.value": _scatter(value=_just(1.0)),
    "aten.scatter_add.default": _scatter(src=_random(2, 3)),
    "aten.scatter_reduce.two": _scatter(src=_random(2, 3), reduce=_just("amax")),
    "aten.index_select.default": {"self": _random(4, 4), "dim": _just(0), "index": _indices(3)},
    "aten.index_add.default": {"self": _random(4, 4), "dim": _just(0), "index": _indices(3), "source": _random(3, 4)},
    "aten.index_copy.default": {"self": _random(4, 4), "dim": _just(0), "index": _indices(3), "source": _random(3, 4)},
    "aten.index.Tensor": {"self": _random(4, 4), "indices": lambda: [torch.zeros(3, dtype=torch.int64), None]},
    "aten.index_put.default": {
        "self": _random(4, 4),
        "indices": lambda: [torch.zeros(3, dtype=torch.int64)],
        "values": _random(3, 4),
    },
    "aten.take.default": {"self": _random(4, 4), "index": _indices(3)},
    "aten.take_along_dim.default": {"self": _random(4, 4), "indices": _indices(2, 4), "dim": _just(0)},
    "aten.masked_scatter.default": {
        "self": _random(4, 4),
        "mask": lambda: torch.ones(4, 4, dtype=torch.bool),
        "source": _random(16),
    },
    "aten.masked_select.default": {"self": _random(4, 4), "mask": lambda: torch.ones(4, 4, dtype=torch.bool)},
    "aten.one_hot.default": {"self": _indices(3), "num_classes": _just(4)},
    "aten.repeat_interleave.Tensor": {"repeats": lambda: torch.tensor([1, 2, 3])},
    "aten.repeat_interleave.self_Tensor": {
        "self": _random(3, 2),
        "repeats": lambda: torch.tensor([1, 2, 3]),
        "dim": _just(0),
    },
    "aten.bmm.default": {"self": _random(2, 3, 4), "mat2": _random(2, 4, 5)},
    "aten.baddbmm.default": {"self": _random(2, 3, 5), "batch1": _random(2, 3, 4), "batch2": _random(2, 4, 5)},
    "aten.addbmm.default": {"self": _random(3, 5), "batch1": _random(2, 3, 4), "batch2": _random(2, 4, 5)},
    "aten._int_mm.default": {
        "self": lambda: torch.ones(32, 16, dtype=torch.int8),
        "mat2": lambda: torch.ones(16, 8, dtype=torch.int8),
    },
    "aten.bilinear.default": {
        "input1": _random(2, 3),
        "input2": _random(2, 4),
        "weight": _random(5, 3, 4),
        "bias": _random(5),
    },
    "aten.im2col.default": {
        "self": _random(2, 3, 6, 6),
        "kernel_size": _just([2, 2]),
        "dilation": _just([1, 1]),
        "padding": _just([0, 0]),
        "stride": _just([1, 1]),
    },
    "aten.col2im.default": {
        "self": _random(2, 12, 25),
        "output_size": _just([6, 6]),
        "kernel_size": _just([2, 2]),
        "dilation": _just([1, 1]),
        "padding": _just([0, 0]),
        "stride": _just([1, 1]),
    },
    "aten.layer_norm.default": {
        "input": _random(2, 4),
        "normalized_shape": _just([4]),
        "weight": _random(4),
        "bias": _random(4),
    },
    "aten.rms_norm.default": {"input": _random(2, 4), "normalized_shape": _just([4]), "weight": _random(4)},
    "aten.native_layer_norm.default": {
        "input": _random(2, 4),
        "normalized_shape": _just([4]),
        "weight": _random(4),
        "bias": _random(4),
        "eps": _just(1e-5),
    },
    "aten.group_norm.default": {
        "input": _random(2, 4, 3),
        "num_groups": _just(2),
        "weight": _random(4),
        "bias": _random(4),
    },
    "aten.native_group_norm.default": {
        "input": _random(2, 4, 3),
        "weight": _random(4),
        "bias": _random(4),
        "N": _just(2),
        "C": _just(4),
        "HxW": _just(3),
        "group": _just(2),
        "eps": _just(1e-5),
    },
    "aten.batch_norm.default": {
        "input": _random(2, 4, 3),
        "weight": _random(4),
        "bias": _random(4),
        "running_mean": _random(4),
        "running_var": lambda: torch.ones(4),
        "training": _just(False),
        "momentum": _just(0.1),
        "eps": _just(1e-5),
        "cudnn_enabled": _just(False),
    },
    "aten.scaled_dot_product_attention.default": {
        "query": _random(2, 2, 4, 8),
        "key": _random(2, 2, 5, 8),
        "value": _random(2, 2, 5, 8),
        "attn_mask": _random(4, 5),
        "dropout_p": _just(0.0),
        "is_causal": _just(False),
    },
    "aten.fake_quantize_per_channel_affine.default": {
        "self": _random(3, 4),
        "scale": lambda: torch.ones(3),
        "zero_point": lambda: torch.zeros(3, dtype=torch.int32),
        "axis": _just(0),
        "quant_min": _just(-128),
        "quant_max": _just(127),
    },
    "aten.as_strided.default": {
        "self": _random(4, 4),
        "size": _just([2, 2]),
        "stride": _just([4, 1]),
        "storage_offset": _just(0),
    },
    "aten.view_as_complex.default": {"self": _random(3, 2)},
    "aten.unfold.default": {"self": _random(6), "dimension": _just(0), "size": _just(2), "step": _just(1)},
    "aten.searchsorted.Tensor": {"sorted_sequence": _random(5), "self": _random(3), "sorter": _indices(5)},
    "aten.bucketize.Tensor": {"self": _random(3), "boundaries": _random(5)},
    "aten.einsum.default": {"equation": _just("ij,jk->ik"), "tensors": lambda: [torch.randn(2, 3), torch.randn(3, 4)]},
    "aten.lstm.input": _recurrent(4),
    "aten.gru.input": _recurrent(3),
    "aten.rnn_tanh.input": _recurrent(1),
    "aten.rnn_relu.input": _recurrent(1),
}
"""Calls that are right, to start from: an op looks at its shapes first, and what comes after is worth reaching."""


def tensor(chance, shape, *, index):
    """Return a tensor of a shape, or of another one now and then; indices are whole numbers that may lie anywhere."""
    shape = chance.choice(SHAPES) if chance.random() < 0.3 else shape
    count = math.prod(shape)
    if index:
        values = [chance.choice(INDICES if chance.random() < 0.5 else INDICES[:4]) for _ in range(count)]
        made = torch.tensor(values, dtype=torch.int64).reshape(shape)
        return made if chance.random() < 0.8 else made.to(chance.choice(DTYPES))
    dtype = chance.choice(DTYPES) if chance.random() < 0.4 else torch.float32
    made = torch.tensor([chance.choice([0.0, 1.0, -2.0, 1e30, math.inf, math.nan]) for _ in range(count)])
    made = (
        made.nan_to_num(3.0, 100.0, -100.0).to(dtype).reshape(shape)
        if not dtype.is_floating_point
        else made.reshape(shape).to(dtype)
    )
    if chance.random() < 0.2 and made.dim() >= 2:
        made = made.transpose(0, -1)
    if chance.random() < 0.1 and made.dim() == 1:
        made = made.expand(3, *made.shape)
    return made


def number(chance):
    return chance.choice(INTS[:9]) if chance.random() < 0.7 else chance.choice(INTS)


def argument(chance, kind, name, shape):
    """Return a hostile value for one argument of a schema."""
    index = any(part in name for part in ("ind", "idx", "boundar", "mask"))
    simple = {
        "Tensor": lambda: tensor(chance, shape, index=index),
        "int": lambda: number(chance),
        "SymInt": lambda: number(chance),
        "float": lambda: chance.choice(FLOATS),
        "bool": lambda: chance.random() < 0.5,
        "number": lambda: chance.choice([number(chance), chance.choice(FLOATS), True]),
        "Scalar": lambda: chance.choice([number(chance), chance.choice(FLOATS), True]),
        "str": lambda: chance.choice(TEXTS),
        "ScalarType": lambda: chance.choice(DTYPES),
        "Layout": lambda: torch.strided,
        "Device": lambda: torch.device("cpu"),
        "MemoryFormat": lambda: chance.choice([torch.contiguous_format, torch.channels_last, torch.preserve_format]),
        "Generator": lambda: None,
    }
    if kind.startswith("Optional["):
        return None if chance.random() < 0.4 else argument(chance, kind[len("Optional[") : -1], name, shape)
    if kind.startswith("List["):
        return [
            argument(chance, kind[len("List[") : -1], name, shape) for _ in range(chance.choice([0, 1, 2, 2, 3, 4, 6]))
        ]
    return simple[kind]() if kind in simple else None


def arguments(function, chance):
    """Return hostile arguments by name; where a right call is known, most of it is kept."""
    shape = chance.choice(SHAPES)
    right = RIGHT.get(str(function))
    if right is not None and chance.random() < 0.8:
        kwargs = {name: value() for name, value in right.items()}
        for name in chance.sample(sorted(kwargs), chance.choice([0, 1, 1, 2]) % (len(kwargs) + 1)):
            kind = next(str(each.real_type) for each in function._schema.arguments if each.name == name)
            kwargs[name] = argument(chance, kind, name, shape)
        return kwargs
    wanted = [each for each in function._schema.arguments if not each.has_default_value() or chance.random() < 0.5]
    return {each.name: argument(chance, str(each.real_type), each.name, shape) for each in wanted}


def too_large(function, kwargs):
    """Whether the reader would refuse the call for its size; what has no such way is called."""
    try:
        meta = {name: on_meta(value) for name, value in kwargs.items()}
        if any(each.name == "device" for each in function._schema.arguments):
            meta["device"] = torch.device("meta")
        result = function(**meta)
    except Exception:  # noqa: BLE001 - not every op runs on tensors without memory
        return any(isinstance(n, int) and abs(n) > 1 << 20 for n in leaves(kwargs))
    return any(isinstance(t, torch.Tensor) and t.numel() * t.element_size() > 1 << 27 for t in leaves(result))


def on_meta(value):
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    return [on_meta(item) for item in value] if isinstance(value, list) else value


def leaves(value):
    if isinstance(value, dict):
        value = list(value.values())
    return [leaf for item in value for leaf in leaves(item)] if isinstance(value, (list, tuple)) else [value]


def call(function, seed):
    """Call an op once; errors are as good as results."""
    kwargs = arguments(function, random.Random(seed))
    if too_large(function, kwargs):
        return "too large"
    try:
        result = checked(function)(**kwargs)
        for leaf in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(leaf, torch.Tensor) and 0 < leaf.numel() < 1 << 20:
                str(leaf.reshape(-1)[:4].tolist())
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, SpartaError) as error:
        return type(error).__name__
    except (TypeError, ValueError) as error:
        return type(error).__name__
    return "fine"


def work(names, progress, trials, seed):
    """Fuzz the ops of a list, and write down which one is next before each call."""
    resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
    torch.set_num_threads(1)
    known = {str(function): function for function in allowed_overloads()}
    fine = {}
    for name in names:
        progress.write_text(json.dumps({"at": name, "fine": fine}))
        outcomes = []
        for trial in range(trials):
            signal.alarm(SECONDS)  # ends the process if the op does not come back
            outcomes.append(call(known[name], f"{seed} {name} {trial}"))
        signal.alarm(0)
        fine[name] = outcomes.count("fine")
    progress.write_text(json.dumps({"at": None, "fine": fine}))


def caught(names, trials, seed):
    """Return the ops that ended their process, with the signal, and how many calls of each op went through."""
    bad, fine, left = {}, {}, list(names)
    with tempfile.TemporaryDirectory() as folder:
        progress, listed = Path(folder) / "progress", Path(folder) / "names"
        while left:
            listed.write_text(json.dumps(left))
            command = [sys.executable, __file__, "--child", str(listed), str(progress), str(trials), str(seed)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if not progress.exists():
                raise SystemExit(done.stderr[-2000:])
            state = json.loads(progress.read_text())
            fine |= state["fine"]
            if state["at"] is None:
                break
            bad[state["at"]] = done.returncode
            left = left[left.index(state["at"]) + 1 :]
    return bad, fine


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=1, help="fuzz every n-th op of the list")
    parser.add_argument("--list", action="store_true", help="print the list of allowed overloads and stop")
    given = parser.parse_args()
    names = [str(function) for function in allowed_overloads()][:: given.every]
    if given.list:
        print("\n".join(names))
        return 0
    bad, fine = caught(names, given.trials, given.seed)
    never = [name for name in names if name not in bad and not fine.get(name)]
    print(f"{len(names)} overloads, {given.trials} calls each; {sum(fine.values())} calls went through")
    print(f"never went through: {', '.join(never) or 'none'}")
    print(f"ended the process: {json.dumps(bad) if bad else 'none'}")
    return 1 if bad else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        _, _, listed, progress, trials, seed = sys.argv
        work(json.loads(Path(listed).read_text()), Path(progress), int(trials), seed)
    else:
        sys.exit(main())
