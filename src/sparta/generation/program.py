"""The decode program: a whole step of a llama-like decoder, prompt or single token, in one call into C++.

:class:`DecodeProgram` holds the packed weights of a decoder; :meth:`DecodeProgram.step` takes the arguments of the
model's own ``forward`` and returns its output, or None for a call that only the model's own code can take. Embeddings
and rotary angles stay PyTorch's, so every kind of scaled positions works.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Mapping
from ctypes import Structure, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from sparta.errors import ShapeError, message
from sparta.generation.cache import CacheViews, Places
from sparta.generation.decoder import Decoder
from sparta.generation.matrices import MatrixStruct, PackedMatrix
from sparta.specialize.cpu.library import ACTIVATIONS, load, raise_for

__all__ = ["DecodeProgram", "Steps"]

_ORDER = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# x, cos, sin, keys, values, mask, logits, buffer; batch, tokens, past, kept, strides of cache and mask; threads.
_CALL = struct.Struct("@8P8q2i")
# The same, then embeddings, tokens, ends, ended, largest; steps, how many ends, padding, steps taken.
_GREEDY = struct.Struct("@8P8q2i5P4q")
_TAKEN_AT = _GREEDY.size - 8
_ROWS = 96  # tokens of one call: weights are unpacked once for all of them
_TAKEN = frozenset(
    {"input_ids", "attention_mask", "position_ids", "past_key_values", "inputs_embeds", "use_cache", "logits_to_keep"}
)
_HARMLESS = frozenset({"cache_position", "return_dict"})


class _LayerStruct(Structure):
    _fields_ = (
        ("input_norm", c_void_p),
        ("middle_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        *((name, MatrixStruct) for name in _ORDER),
    )


class _ProgramStruct(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("hidden", "heads", "kv_heads", "head_dim", "wide", "layers")),
        ("each", c_void_p),
        ("final_norm", c_void_p),
        ("head", MatrixStruct),
        ("epsilon", c_float),
        ("scaling", c_float),
        ("activation", c_int32),
        ("unused", c_int32),
    )


@dataclass(frozen=True, eq=False)
class Steps:
    """Tokens to decode greedily.

    Attributes
    ----------
    first
        (batch,): the tokens to go on from.
    positions
        (batch, steps).
    mask
        (batch, keys) with as many keys as there are after the last step, not 0 where one is seen; None for all.
    """

    first: Tensor
    positions: Tensor
    mask: Tensor | None


class DecodeProgram:
    """A decoder packed for C++.

    Parameters
    ----------
    decoder
        What the model is made of.
    matrices
        The packed weights by the names of their layers. The two halves of each gated MLP must have one form.
    """

    def __init__(self, decoder: Decoder, matrices: Mapping[str, PackedMatrix]) -> None:
        self.decoder, self.matrices = decoder, dict(matrices)
        self.library = load()
        self.caches = CacheViews(len(decoder.blocks), decoder.sizes["kv_heads"], decoder.sizes["head_dim"])
        self.vocabulary = matrices[decoder.head].shape[0]
        self._kept: list[Any] = []
        self._struct = self._program()
        self._own = threading.local()  # memory of a call; calls from several threads run at the same time

    def __deepcopy__(self, memo: dict[int, Any]) -> DecodeProgram:
        return DecodeProgram(self.decoder, self.matrices)

    def _program(self) -> _ProgramStruct:
        """Return the structure, and keep what it points to."""
        decoder = self.decoder
        layers = (_LayerStruct * len(decoder.blocks))()
        for layer, block in zip(layers, decoder.blocks, strict=True):
            given = (block.input_norm, block.middle_norm, block.query_norm, block.key_norm)
            norms = [None if n is None else n.contiguous() for n in given]
            matrices = [self.matrices[block.linears[name]] for name in _ORDER]
            self._kept += [norms, matrices]
            layer.input_norm, layer.middle_norm, layer.query_norm, layer.key_norm = (
                None if norm is None else norm.data_ptr() for norm in norms
            )
            for name, matrix in zip(_ORDER, matrices, strict=True):
                setattr(layer, name, matrix.struct())
        final = decoder.final_norm.contiguous()
        self._kept += [layers, final]
        sizes = [decoder.sizes[name] for name in ("hidden", "heads", "kv_heads", "head_dim", "wide")]
        numbers = (decoder.epsilon, decoder.scaling, ACTIVATIONS[decoder.activation], 0)
        head = self.matrices[decoder.head].struct()
        return _ProgramStruct(*sizes, len(layers), ctypes.addressof(layers), final.data_ptr(), head, *numbers)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights."""
        return sum(matrix.nbytes for matrix in self.matrices.values())

    # ------------------------------------------------------------------ one call of forward

    def step(self, model: Any, given: Mapping[str, Any]) -> tuple[Tensor, Any] | None:
        """Return logits and the cache for the arguments of ``forward``, by name; None where they do not fit."""
        named = {key: value for key, value in given.items() if value is not None and value is not False}
        embeds = _embeddings(model, named) if _plain_call(model.config, named) else None
        cache = named.get("past_key_values")
        held = cache if cache is not None else _new_cache(model.config)
        if embeds is None or embeds.shape[2] != self.decoder.sizes["hidden"] or not self.caches.fits(held):
            return None
        batch, tokens = embeds.shape[:2]
        past = self.caches.past(held)
        mask = _mask(named.get("attention_mask"), batch, tokens, past)
        positions = _positions(named.get("position_ids"), batch, tokens, past)
        beyond = self.decoder.window is not None and past + tokens > self.decoder.window
        if isinstance(mask, str) or positions is None or beyond:
            return None
        places = self.caches.open(held, batch, tokens)
        if places is None:
            return None
        base = getattr(model, model.base_model_prefix)
        cos, sin = self._angles(base, embeds, positions)
        keep = named.get("logits_to_keep", 0)
        logits = self.run(embeds, (cos, sin), places, mask, tokens if keep == 0 else min(keep, tokens))
        wanted = given.get("use_cache")
        uses_cache = bool(model.config.use_cache if wanted is None else wanted)
        return logits, held if uses_cache or cache is not None else None

    def run(
        self, embeds: Tensor, angles: tuple[Tensor, Tensor], places: Places, mask: Tensor | None, kept: int
    ) -> Tensor:
        """Return the logits (batch, kept, vocabulary) of the last `kept` tokens.

        Parameters
        ----------
        embeds
            (batch, tokens, hidden).
        angles
            cos and sin, (batch or 1, tokens, head_dim).
        mask
            (batch, 1 or tokens, keys), 1 where a key may be seen; None for all.
        """
        batch, tokens, _ = embeds.shape
        logits = torch.empty(batch, kept, self.vocabulary)
        chunk = max(1, min(tokens, _ROWS // batch))
        cos, sin = (t.expand(batch, tokens, -1) for t in angles)
        for first in range(0, tokens, chunk):
            count = min(chunk, tokens - first)
            here = max(0, min(count, first + count - (tokens - kept)))
            x, *turned = (t[:, first : first + count].to(torch.float32).contiguous() for t in (embeds, cos, sin))
            x = x.clone() if x.data_ptr() == embeds.data_ptr() else x
            out = logits if here == kept else torch.empty(batch, here, self.vocabulary)
            part = mask if mask is None or mask.shape[1] == 1 else mask[:, first:]
            call = _CALL.pack(
                x.data_ptr(),
                turned[0].data_ptr(),
                turned[1].data_ptr(),
                ctypes.addressof(places.keys),
                ctypes.addressof(places.values),
                0 if part is None else part.data_ptr(),
                out.data_ptr(),
                self._room(batch * count).data_ptr(),
                batch,
                count,
                places.past + first,
                here,
                places.batch_stride,
                places.head_stride,
                0 if part is None else part.stride(0),
                0 if part is None or part.shape[1] == 1 else part.stride(1),
                torch.get_num_threads(),
                0,
            )
            code = self.library.handle.sparta_decode(ctypes.byref(self._struct), call)
            if code:
                raise_for(code)
            if here and here != kept:
                begin = first + count - here - (tokens - kept)
                logits[:, begin : begin + here] = out
        return logits

    def follow(
        self, model: Any, cache: Any, steps: Steps, ends: list[int], padding: int, ended: Tensor
    ) -> Tensor | None:
        """Return the tokens (batch, steps or fewer) that follow greedily; None where the call does not fit.

        Parameters
        ----------
        ends, padding
            Tokens after which a sequence has ended, and what it gets from then on. With all ended, no more follow.
        ended
            (batch,) in uint8, not 0 where a sequence has; it is updated.
        """
        batch, count = steps.positions.shape
        base = getattr(model, model.base_model_prefix)
        table: Tensor = base.embed_tokens.weight
        plain = table.dtype == torch.float32 and table.is_contiguous() and len(table) >= self.vocabulary
        plain = plain and table.shape[1] == self.decoder.sizes["hidden"] and 0 <= padding < len(table)
        if not plain or batch > _ROWS or not self.caches.fits(cache):
            return None
        past = self.caches.past(cache)
        mask = _mask(steps.mask, batch, count, past)
        if isinstance(mask, str) or (self.decoder.window is not None and past + count > self.decoder.window):
            return None
        places = self.caches.open(cache, batch, count)
        if places is None:
            return None
        angles = self._angles(base, table[:1, None], steps.positions)
        cos, sin = (t.expand(batch, count, -1).transpose(0, 1).to(torch.float32).contiguous() for t in angles)
        x, logits = torch.empty(batch, table.shape[1]), torch.empty(batch, self.vocabulary)
        tokens = torch.empty(count + 1, batch, dtype=torch.int64)
        tokens[0] = steps.first
        stops = torch.tensor(ends, dtype=torch.int64)
        threads = torch.get_num_threads()
        largest = torch.empty(threads, batch, dtype=torch.int64)
        room = self._room(batch)
        call = _GREEDY.pack(
            *(
                x.data_ptr(),
                cos.data_ptr(),
                sin.data_ptr(),
                ctypes.addressof(places.keys),
                ctypes.addressof(places.values),
            ),
            *(0 if mask is None else mask.data_ptr(), logits.data_ptr(), room.data_ptr()),
            *(batch, 1, places.past, 1, places.batch_stride, places.head_stride),
            *(0 if mask is None else mask.stride(0), 0, threads, 0),
            *(table.data_ptr(), tokens.data_ptr(), stops.data_ptr(), ended.data_ptr(), largest.data_ptr()),
            *(count, len(ends), padding, 0),
        )
        memory = ctypes.create_string_buffer(call, len(call))
        code = self.library.handle.sparta_decode_greedy(ctypes.byref(self._struct), memory)
        if code:
            raise_for(code)
        taken = int(struct.unpack_from("@q", memory, _TAKEN_AT)[0])
        if taken < count:
            cache.crop(taken - count)
        return tokens[1 : taken + 1].t()

    def _angles(self, base: Any, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cos and sin of positions (batch or 1, tokens), by the model's own code."""
        cos, sin = base.rotary_emb(like, position_ids=positions)
        wanted = self.decoder.sizes["head_dim"]
        if cos.shape[-1] != wanted or sin.shape != cos.shape:
            raise ShapeError(message(f"angles of {cos.shape[-1]}", f"{wanted}, the size of a head"))
        return cos, sin

    def _room(self, rows: int) -> Tensor:
        """Return memory that the threads of a call share."""
        needed = int(self.library.handle.sparta_decode_buffer(ctypes.byref(self._struct), rows))
        held: Tensor | None = getattr(self._own, "buffer", None)
        if held is None or held.numel() < needed:
            held = self._own.buffer = torch.empty(needed)
        return held


def _plain_call(config: Any, named: Mapping[str, Any]) -> bool:
    """Whether a call asks for nothing but logits and the cache, and passes nothing that a program does not know."""
    asked = ("output_attentions", "output_hidden_states")
    if any(key not in _TAKEN | _HARMLESS for key in named) or any(getattr(config, name, False) for name in asked):
        return False
    keep = named.get("logits_to_keep", 0)
    return isinstance(keep, int) and named.get("return_dict", getattr(config, "return_dict", True)) is True


def _embeddings(model: Any, named: Mapping[str, Any]) -> Tensor | None:
    ids, embeds = named.get("input_ids"), named.get("inputs_embeds")
    if (ids is None) == (embeds is None):
        return None
    if ids is not None:
        if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.device.type != "cpu" or not ids.numel():
            return None
        base = getattr(model, model.base_model_prefix)
        return cast("Tensor", cast("nn.Module", base.embed_tokens)(ids))
    fits = isinstance(embeds, Tensor) and embeds.dim() == 3 and embeds.numel() and embeds.device.type == "cpu"
    return embeds if fits else None


def _new_cache(config: Any) -> Any:
    from transformers.cache_utils import DynamicCache

    return DynamicCache(config=config)


def _positions(given: Tensor | None, batch: int, tokens: int, past: int) -> Tensor | None:
    """Return positions (batch or 1, tokens), counted from the cache's length where none are given."""
    if given is None:
        return torch.arange(past, past + tokens)[None]
    return given if given.dim() == 2 and given.shape[0] in (1, batch) and given.shape[1] == tokens else None


def _mask(given: Any, batch: int, tokens: int, past: int) -> Tensor | str | None:
    """Return which keys may be seen as bytes (batch, 1 or tokens, keys), None for all; words where it does not fit.

    Whatever it says, a token sees none that comes after it.
    """
    if given is None:
        return None
    if not isinstance(given, Tensor):
        return "no tensor"
    if given.dim() == 2:
        if tuple(given.shape) != (batch, past + tokens):
            return "of another length"
        return None if bool(given.all()) else given.ne(0).to(torch.uint8).contiguous()[:, None]
    causal = given.dim() == 4 and given.dtype == torch.bool
    if not causal or given.shape[1] != 1 or given.shape[2] != tokens or given.shape[3] < past + tokens:
        return "neither a padding mask nor a mask of booleans for each token"
    return given[:, 0].expand(batch, -1, -1).to(torch.uint8).contiguous()
