"""The ops that a stored graph may call, and the text and numbers that it may pass to them.

A list of what is refused can never be complete, so this is a list of what is allowed: functional ops on dense tensors
that models in evaluation are made of. Backward passes, ops that trust indices, uninitialised memory, sparse, quantized
and nested tensors, random state, printing and files are left out, and so are overloads that know no tensor.
`tests/fuzz/ops.py` calls every overload of the list with hostile arguments.
"""

from __future__ import annotations

import operator
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from sparta.errors import FileFormatError, message

__all__ = ["OPERATORS", "allowed_overloads", "check_arguments", "check_text", "checked", "function_named", "name_of"]

_ELEMENTWISE = """
__and__ __or__ __xor__
abs absolute acos acosh add addcdiv addcmul angle arccos arccosh arcsin arcsinh arctan arctan2 arctanh asin asinh atan
atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil clamp clamp_max
clamp_min clip conj conj_physical copysign cos cosh deg2rad div divide eq erf erfc erfinv exp exp2 expm1 fill fix
float_power floor floor_divide fmax fmin fmod frac ge greater greater_equal gt heaviside hypot imag isclose isfinite
isin isinf isnan isneginf isposinf isreal ldexp le lerp less less_equal lgamma log log10 log1p log2 logaddexp
logaddexp2 logical_and logical_not logical_or logical_xor logit lt masked_fill maximum minimum mul multiply nan_to_num
ne neg negative not_equal positive pow rad2deg real reciprocal remainder round rsqrt rsub sgn sigmoid sign signbit sin
sinc sinh special_erf special_exp2 special_expit special_expm1 special_i0 special_log1p special_ndtr special_round
sqrt square sub subtract tan tanh true_divide trunc where xlogy
"""
_ACTIVATIONS = """
celu elu gelu glu hardshrink hardsigmoid hardswish hardtanh leaky_relu log_sigmoid mish prelu relu relu6 selu silu
softplus softshrink threshold log_softmax softmax _softmax _log_softmax _safe_softmax
"""
_REDUCTIONS = """
all amax amin aminmax any argmax argmin argsort count_nonzero cummax cummin cumprod cumsum diff dist equal kthvalue
linalg_vector_norm logcumsumexp logsumexp max mean median min mode msort nanmean nansum norm prod sort std std_mean sum
topk trace var var_mean cosine_similarity pairwise_distance
"""
_PRODUCTS = """
addbmm addmm addmv addr baddbmm bilinear bmm cdist chain_matmul cross dot einsum inner kron linalg_cross linalg_matmul
linalg_vecdot linear matmul mm mv outer tensordot vdot _int_mm scaled_dot_product_attention
"""
_LAYERS = """
adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d
adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d avg_pool1d avg_pool2d avg_pool3d batch_norm
_native_batch_norm_legit_no_training channel_shuffle col2im conv1d conv2d conv3d conv_transpose1d conv_transpose2d
conv_transpose3d convolution dropout feature_dropout alpha_dropout embedding fake_quantize_per_channel_affine
fake_quantize_per_tensor_affine grid_sampler grid_sampler_2d grid_sampler_3d affine_grid_generator group_norm gru
im2col instance_norm layer_norm lstm max_pool1d max_pool2d max_pool3d native_group_norm native_layer_norm one_hot
pixel_shuffle pixel_unshuffle rms_norm rnn_relu rnn_tanh upsample_bicubic2d upsample_bilinear2d upsample_linear1d
upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d _upsample_nearest_exact1d
_upsample_nearest_exact2d _upsample_nearest_exact3d
"""
_SHAPES = """
adjoint alias as_strided atleast_1d atleast_2d atleast_3d block_diag broadcast_tensors broadcast_to cat chunk clone
column_stack concat concatenate constant_pad_nd contiguous detach diag diag_embed diagonal dsplit dstack expand
expand_as flatten flip fliplr flipud hsplit hstack mH mT matrix_H meshgrid moveaxis movedim narrow numpy_T pad permute
ravel reflection_pad1d reflection_pad2d reflection_pad3d repeat repeat_interleave replication_pad1d replication_pad2d
replication_pad3d reshape reshape_as roll rot90 select slice split split_with_sizes squeeze stack swapaxes swapdims t
tensor_split tile transpose tril triu unbind unflatten unfold unsqueeze view view_as vsplit vstack view_as_complex
view_as_real complex polar _reshape_copy _unsafe_view lift_fresh_copy resolve_conj resolve_neg
"""
_INDEXING = """
bucketize gather index index_add index_copy index_fill index_put index_select masked_scatter masked_select nonzero
scatter scatter_add scatter_reduce searchsorted select_scatter slice_scatter diagonal_scatter take take_along_dim
unique_consecutive
"""
_SPECTRA = """
fft_fft fft_fft2 fft_fftn fft_fftshift fft_ifft fft_ifft2 fft_ifftn fft_ifftshift fft_irfft fft_irfft2 fft_irfftn
fft_rfft fft_rfft2 fft_rfftn
"""
_MAKING = """
arange eye full full_like linspace new_full new_ones new_zeros ones ones_like rand rand_like randn randn_like
scalar_tensor tril_indices triu_indices zeros zeros_like
"""
_CASTS = "_to_copy to type_as sym_size sym_numel sym_stride"

_FAMILIES = (_ELEMENTWISE, _ACTIVATIONS, _REDUCTIONS, _PRODUCTS, _LAYERS, _SHAPES, _INDEXING, _SPECTRA, _MAKING, _CASTS)
_PACKETS = frozenset(name for family in _FAMILIES for name in family.split())
_OTHER_OVERLOADS = ("prim_", "data")
"""Forms for interpreters of their own, and for packed sequences."""
_OURS = frozenset({"masked_attention", "fixed_product", "experts"})
"""Ops of ours that a file may name: they take tensors of the graph and the text of a choice, never a handle."""

_ZEROED = {
    "aten.empty.memory_format": "aten.zeros.default",
    "aten.empty_like.default": "aten.zeros_like.default",
    "aten.new_empty.default": "aten.new_zeros.default",
}
"""What is written for ops that return memory as they find it."""

_TEXT = re.compile(r"[A-Za-z0-9_ .,:;=+\-*/<>()\[\]{}\"]{0,4096}")
"""Modes, equations and choices; nothing that could end a quoted string."""
_MOST_BITS = 4096
_LITERALS: dict[str, type] = {
    "ScalarType": torch.dtype,
    "Layout": torch.layout,
    "MemoryFormat": torch.memory_format,
    "Device": torch.device,
    "str": str,
}
"""What must stand in the call itself."""
_NUMBERS: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "SymInt": (int,),
    "bool": (int,),
    "SymBool": (int,),
    "float": (int, float),
    "number": (int, float),
    "Scalar": (int, float),
    "Tensor": (int, float),
}
"""What may; a number for a tensor is one of its size."""


def _bounded_mul(a: Any, b: Any) -> Any:
    """Return ``a * b`` of numbers; a list times a number could be of any length."""
    return operator.mul(_number(a), _number(b))


def _bounded_pow(a: Any, b: Any) -> Any:
    """Return ``a ** b`` of numbers, of up to 4096 bits where they are whole."""
    if isinstance(a, int) and isinstance(b, int) and abs(a) > 1 and a.bit_length() * abs(b) > _MOST_BITS:
        raise FileFormatError(message(f"the graph computes {a} ** {b}", f"numbers of up to {_MOST_BITS} bits"))
    return operator.pow(_number(a), _number(b))


def _number(value: Any) -> Any:
    if isinstance(value, (list, tuple, str, bytes, dict)) or (
        isinstance(value, int) and value.bit_length() > _MOST_BITS
    ):
        raise FileFormatError(message(f"the graph does arithmetic on a {type(value).__name__}", "numbers"))
    return value


OPERATORS: dict[str, Callable[..., Any]] = {
    f"operator.{name}": getattr(operator, name)
    for name in ("getitem", "add", "sub", "floordiv", "truediv", "mod", "neg", "and_", "or_", "not_")
}
"""Arithmetic on sizes, by the names that files use."""
OPERATORS |= {f"operator.{name}": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
OPERATORS |= {
    f"torch.{name}": getattr(torch, name) for name in ("sym_max", "sym_min", "sym_float", "sym_int", "sym_not")
}
OPERATORS |= {"operator.mul": _bounded_mul, "operator.pow": _bounded_pow}
_NAMES: dict[Any, str] = {function: name for name, function in OPERATORS.items()}
_NAMES |= {operator.mul: "operator.mul", operator.pow: "operator.pow"}


def _checked_lstm(  # noqa: PLR0913, PLR0917 - as the op takes them
    input: Tensor,  # noqa: A002
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,  # noqa: FBT001
    num_layers: int,
    dropout: float,
    train: bool,  # noqa: FBT001
    bidirectional: bool,  # noqa: FBT001
    batch_first: bool,  # noqa: FBT001
) -> Any:
    """Run ``aten.lstm`` on weights that fit each other; the library below it does not look."""
    ways, per_cell = 2 if bidirectional else 1, 4 if has_biases else 2
    if len(hx) != 2 or input.dim() != 3 or not 1 <= num_layers == len(params) / (ways * per_cell):
        raise FileFormatError(message("a stored LSTM without its weights and states"))
    hidden, rows = hx[1].shape[-1], 4 * hx[1].shape[-1]
    state = (num_layers * ways, input.shape[0 if batch_first else 1], hidden)
    wanted: list[tuple[int, ...]] = [state, state]
    for layer in range(num_layers):
        width = ways * hidden if layer else input.shape[-1]
        wanted += [(rows, width), (rows, hidden), (rows,), (rows,)][:per_cell] * ways
    given = [*hx, *params]
    if [tuple(t.shape) for t in given] != wanted or any(t.dtype != input.dtype for t in given):
        raise FileFormatError(message("a stored LSTM whose weights and states do not fit each other"))
    return torch.ops.aten.lstm.input(
        input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first
    )


_CHECKED: dict[str, Callable[..., Any]] = {"aten.lstm.input": _checked_lstm}
"""Ops that trust what they are given, run only after a look at it."""
_NAMES |= {function: name for name, function in _CHECKED.items()}


def checked(function: OpOverload) -> Callable[..., Any]:
    """Return what a stored graph calls for an op: the op, or a function that looks at its arguments first."""
    return _CHECKED.get(str(function), function)


def function_named(name: str) -> Callable[..., Any]:
    """Return the function that a file names.

    >>> function_named("aten.relu.default")
    <OpOverload(op='aten.relu', overload='default')>
    >>> function_named("aten.from_file.default")
    Traceback (most recent call last):
    sparta.errors.FileFormatError: the graph calls 'aten.from_file.default'; allowed: ...
    """
    if name in OPERATORS:
        return OPERATORS[name]
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    if packet in {"aten": _PACKETS, "sparta": _OURS}.get(namespace, ()):
        found = getattr(getattr(getattr(torch.ops, namespace), packet, None), overload or "default", None)
        if isinstance(found, OpOverload) and _is_pure(found):
            return found
    raise FileFormatError(
        message(
            f"the graph calls {name!r}",
            "functional ops on dense tensors, arithmetic on sizes, and sparta's own",
            "do not trust a file that calls it; if your own model does, keep that part out of what you compile",
        )
    )


def name_of(target: Any) -> str:
    """Return the name under which a function is written to files; raises for one that could not be read back."""
    if target in _NAMES:
        return _NAMES[target]
    if isinstance(target, OpOverload):
        name = _ZEROED.get(str(target), str(target))
        function_named(name)
        return name
    raise FileFormatError(
        message(f"the model calls {target}, which cannot be written", "ATen ops", "keep it out of the saved model")
    )


def check_text(text: str) -> str:
    """Return a string argument of an op; raises for one that is longer or stranger than ops take.

    >>> check_text("tanh")
    'tanh'
    """
    if not _TEXT.fullmatch(text):
        raise FileFormatError(message(f"the graph has the text {text[:40]!r}", "modes and equations, as ops take them"))
    return text


def check_arguments(function: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise unless an overload's schema has these arguments, and literals among them are of its types.

    PyTorch itself takes a whole number for a dtype, and crashes on one that is none.

    >>> check_arguments(torch.ops.aten.sum.default, [fx.Graph().placeholder("x")], {"dtype": 99})
    Traceback (most recent call last):
    sparta.errors.FileFormatError: dtype=99 of aten.sum.default; allowed: Optional[ScalarType].
    """
    known = function._schema.arguments
    positional = [argument for argument in known if not argument.kwarg_only]
    given = {argument.name: value for argument, value in zip(positional, args, strict=False)}
    if len(args) > len(positional) or set(given) & set(kwargs):
        raise FileFormatError(message(f"{len(args)} arguments of {function} by position", f"up to {len(positional)}"))
    given |= kwargs
    kinds = {argument.name: str(argument.real_type) for argument in known}
    for name, value in given.items():
        if name not in kinds:
            raise FileFormatError(message(f"the argument {name[:60]!r} of {function}", ", ".join(kinds)))
        if not _fits(value, kinds[name]):
            raise FileFormatError(message(f"{name}={reprlib.repr(value)} of {function}", kinds[name]))


def _fits(value: Any, kind: str) -> bool:
    """Whether a literal, or the result of another call, may stand for an argument of a type."""
    if kind.startswith("Optional["):
        return value is None or _fits(value, kind[len("Optional[") : -1])
    if isinstance(value, fx.Node):
        return kind not in _LITERALS
    if kind.startswith("List["):
        inner = kind[len("List[") : -1]
        return all(_fits(item, inner) for item in value) if isinstance(value, (list, tuple)) else _fits(value, inner)
    return isinstance(value, _LITERALS.get(kind, _NUMBERS.get(kind, ())))


def allowed_overloads() -> Iterator[OpOverload]:
    """Yield every ATen overload of this version of torch that a stored graph may call, sorted by name."""
    for packet in sorted(_PACKETS):
        found = getattr(torch.ops.aten, packet, None)
        for overload in sorted(found.overloads()) if found is not None else ():
            function = getattr(found, overload)
            if _is_pure(function):
                yield function


def _is_pure(function: OpOverload) -> bool:
    """Whether an overload changes nothing in place and knows a tensor; others work on lists, text and numbers."""
    schema = function._schema
    if schema.is_mutable or schema.overload_name.startswith(_OTHER_OVERLOADS):
        return False
    types = [str(part.type) for part in (*schema.arguments, *schema.returns)]
    return any("Tensor" in each for each in types)
