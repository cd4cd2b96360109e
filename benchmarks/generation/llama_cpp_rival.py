"""llama.cpp as a rival of decoding: a process that decodes on request, and files in its quantisations.

A model of transformers is written as a GGUF too, for shapes that nobody publishes. The rival is reached through the C
bindings of llama-cpp-python alone (``llama_cpp/llama_cpp.py``), so nothing else of that package is needed;
``LLAMA_CPP_LIB_PATH`` may name a folder with other builds of its libraries.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["LlamaCpp", "quantized", "write_gguf"]

_BINDINGS = """
import ctypes, json, sys, time, types
package = types.ModuleType("llama_cpp")  # the bindings alone, without what the package imports beside them
package.__path__ = [sys.argv[1] + "/llama_cpp"]
sys.modules["llama_cpp"] = package
import llama_cpp.llama_cpp as c
quiet = c.llama_log_callback(lambda level, text, data: None)
c.llama_log_set(quiet, ctypes.c_void_p(0))
c.llama_backend_init()
"""
_DECODE = (
    _BINDINGS
    + """
file, threads, tokens, ids = sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), json.loads(sys.argv[5])
model = c.llama_model_load_from_file(file.encode(), c.llama_model_default_params())
settings = c.llama_context_default_params()
settings.n_ctx, settings.n_batch, settings.n_threads, settings.n_threads_batch = 1024, 512, threads, threads
context = c.llama_init_from_model(model, settings)
greedy = c.llama_sampler_init_greedy()
def put(some):
    array = (c.llama_token * len(some))(*some)
    if c.llama_decode(context, c.llama_batch_get_one(array, len(some))):
        raise SystemExit("llama.cpp could not decode")
def run():
    c.llama_memory_clear(c.llama_get_memory(context), True)
    put(ids)
    start = time.perf_counter()
    for _ in range(tokens):
        put([c.llama_sampler_sample(greedy, context, -1)])
    return tokens / (time.perf_counter() - start)
run()
print("ready", flush=True)
for line in sys.stdin:
    print(json.dumps(run()), flush=True)
"""
)
_QUANTIZE = (
    _BINDINGS
    + """
source, target, kind = sys.argv[2], sys.argv[3], sys.argv[4]
settings = c.llama_model_quantize_default_params()
settings.ftype = getattr(c, "LLAMA_FTYPE_MOSTLY_" + kind)
settings.allow_requantize = True
code = c.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(settings))
raise SystemExit(f"llama.cpp could not quantise: {code}" if code else 0)
"""
)


def _environment() -> dict[str, str]:
    kept = ("PATH", "LLAMA_CPP_LIB_PATH", "LD_LIBRARY_PATH")
    return {name: os.environ[name] for name in kept if name in os.environ}


class LlamaCpp:
    """llama.cpp in a process of its own, which decodes once for each line it is sent.

    Parameters
    ----------
    packages
        A folder with the package ``llama_cpp``.
    ids
        The prompt's tokens.
    """

    def __init__(self, file: Path, packages: str, ids: Sequence[int], tokens: int, threads: int) -> None:
        command = [sys.executable, "-c", _DECODE, packages, str(file), str(threads), str(tokens), json.dumps(list(ids))]
        self._process = subprocess.Popen(  # noqa: S603 - an argument list
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_environment()
        )
        if self._answer() != "ready":
            raise SystemExit(f"llama.cpp does not run {file}")

    def _answer(self) -> str:
        assert self._process.stdout is not None  # noqa: S101 - a pipe
        return self._process.stdout.readline().strip()

    def __call__(self) -> float:
        """Return tokens per second of one run."""
        assert self._process.stdin is not None  # noqa: S101 - a pipe
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(json.loads(self._answer()))

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None  # noqa: S101 - a pipe
        self._process.stdin.close()
        self._process.wait()


def quantized(file: Path, kind: str, folder: Path, packages: str) -> Path:
    """Write a GGUF in another quantisation, such as ``Q8_0``, by llama.cpp's own quantiser; return its path."""
    target = folder / f"{file.stem.split('.')[0]}-{kind}.gguf"
    command = [sys.executable, "-c", _QUANTIZE, packages, str(file), str(target), kind]
    subprocess.run(command, check=True, env=_environment())  # noqa: S603 - an argument list
    return target


def write_gguf(model: Any, path: Path) -> Path:
    """Write a llama model of transformers as a GGUF in F16, with a vocabulary of made-up words; needs ``gguf``."""
    import gguf
    import numpy as np

    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    kinds = gguf.TokenType
    special = [("<unk>", kinds.UNKNOWN), ("<s>", kinds.CONTROL), ("</s>", kinds.CONTROL)]
    raw = [(f"<0x{byte:02X}>", kinds.BYTE) for byte in range(256)]
    words = [(f"word{i}", kinds.NORMAL) for i in range(config.vocab_size - len(special) - len(raw))]
    vocabulary = [*special, *raw, *words]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([word for word, _ in vocabulary])
    writer.add_token_scores([0.0] * len(vocabulary))
    writer.add_token_types([kind for _, kind in vocabulary])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        values = tensor.float().numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        known = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if known is None:
            raise SystemExit(f"GGUF has no name for {name}")
        writer.add_tensor(known, values.astype(np.float32 if values.ndim == 1 else np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
