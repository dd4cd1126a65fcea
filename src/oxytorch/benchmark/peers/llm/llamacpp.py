"""llama.cpp, through the package llama-cpp-python, on a GGUF file of the same weights."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from oxytorch.benchmark.core.contest import Absent, require
from oxytorch.benchmark.llm.task import Contestant, LlmTask, Stepwise

TYPES = {"bf16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
"""Our formats -> llama.cpp's: blocks of 32 weights with a float16 scale each."""

FAMILIES = {"llama": "llama", "mistral": "llama", "qwen3": "qwen3"}
"""model_type of transformers -> architecture of GGUF; others are not written here."""

_FIXED = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_OF_A_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def prepare_llamacpp(task: LlmTask) -> Contestant:
    """The model as a GGUF file, loaded by llama.cpp."""
    require("llama_cpp", "pip install llama-cpp-python gguf")
    require("gguf", "pip install gguf")
    path = task.work / f"{task.shape or Path(task.folder).name}-{TYPES[task.weights]}.gguf"
    if not path.exists():
        task.progress("", "build")
        model = task.build()
        task.progress("", "write GGUF")
        unfinished = path.with_suffix(".part")
        write_gguf(model, TYPES[task.weights], unfinished)
        unfinished.rename(path)
        del model
    task.progress("", "load")
    return _contestant(path, task)


def write_gguf(model: Any, kind: str, path: Path, words: Sequence[str] | None = None) -> None:
    """Writes a model's weights in a type of llama.cpp; norms stay float32.

    words: the vocabulary, without which its server does not start; the first three are the unknown
    word, the begin and the end. Raises Absent for a family that is not in FAMILIES.
    """
    gguf = importlib.import_module("gguf")
    config = model.config
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise Absent(f"a GGUF file of a {config.model_type} is not written here")
    writer = gguf.GGUFWriter(str(path), family)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(_rope_base(config))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if words is None:
        writer.add_tokenizer_model("no_vocab")
    else:
        _add_vocabulary(writer, gguf.TokenType, words)
    quantized = getattr(gguf.GGMLQuantizationType, kind)
    for name, tensor in _named(model, family):
        values = tensor.detach().float().numpy()
        if tensor.dim() < 2:
            writer.add_tensor(name, values)
            continue
        packed = gguf.quants.quantize(values, quantized)
        writer.add_tensor(name, packed, raw_dtype=quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_vocabulary(writer: Any, kinds: Any, words: Sequence[str]) -> None:
    special = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*words[:3], *(f"\u2581{word}" for word in words[3:])])
    writer.add_token_scores([-float(number) for number in range(len(words))])
    writer.add_token_types([*special, *[kinds.NORMAL] * (len(words) - 3)])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)


def _rope_base(config: Any) -> float:
    """The base of rotary embeddings; a field of its own before transformers 5."""
    parameters: Any = getattr(config, "rope_parameters", None) or {}
    base: Any = parameters.get("rope_theta") or getattr(config, "rope_theta", 10000.0)
    return float(base)


def _named(model: nn.Module, family: str) -> Iterator[tuple[str, Tensor]]:
    """Weights under GGUF's names, in its order of rows."""
    config: Any = model.config
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name in _FIXED:
            yield _FIXED[name], tensor
            continue
        _, _, number, rest = name.split(".", 3)
        part = rest.removesuffix(".weight")
        heads = {
            "self_attn.q_proj": config.num_attention_heads,
            "self_attn.k_proj": config.num_key_value_heads,
        }.get(part)
        if heads is not None and family == "llama":
            tensor = _interleaved(tensor, heads)
        yield f"blk.{number}.{_OF_A_LAYER[part]}.weight", tensor


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """Rows in the order of llama.cpp's llama, which rotates pairs of neighbours, not halves."""
    rows, width = weight.shape
    return weight.view(heads, 2, rows // heads // 2, width).transpose(1, 2).reshape(rows, width)


def _contestant(path: Path, task: LlmTask) -> Stepwise:
    llama: Any = importlib.import_module("llama_cpp")
    # The library keeps the pointer only.
    silence = llama.llama_log_callback(lambda level, text, user_data: None)
    llama.llama_log_set(silence, ctypes.c_void_p())
    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
    if not model:
        raise RuntimeError(f"llama.cpp could not load {path.name}")
    settings = llama.llama_context_default_params()
    settings.n_ctx = task.prompt + task.tokens + 8
    settings.n_batch = settings.n_ubatch = max(512, task.prompt)
    settings.n_threads = settings.n_threads_batch = task.threads
    context = llama.llama_init_from_model(model, settings)
    vocabulary = int(llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model)))

    def last() -> Tensor:
        values = llama.llama_get_logits_ith(context, -1)
        address = ctypes.cast(values, ctypes.POINTER(ctypes.c_float * vocabulary))
        return torch.frombuffer(address.contents, dtype=torch.float32).clone()

    def run(tokens: list[int]) -> int:
        array = (llama.llama_token * len(tokens))(*tokens)
        status = llama.llama_decode(context, llama.llama_batch_get_one(array, len(tokens)))
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        return int(last().argmax())

    def start(ids: Tensor) -> int:
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        return run(ids[0].tolist())

    notes: dict[str, object] = {"format": TYPES[task.weights], "file_bytes": path.stat().st_size}
    return Stepwise(vocabulary, start, lambda token: run([token]), last, notes=notes, keep=silence)
