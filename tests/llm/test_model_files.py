"""Language models in files: they generate what they did, at every level, without transformers."""

from __future__ import annotations

import copy
import hashlib
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from language_models import FAMILIES, VOCABULARY, build, prompt
from torch import Tensor, nn

import oxytorch
from oxytorch import isa, llm
from oxytorch.core.tensor_file import TensorFile
from oxytorch.llm.files import VERSIONS
from oxytorch.ops import pack_panels
from oxytorch.ops.panels import PanelWeight
from oxytorch.quantization import Int8Weight
from oxytorch.quantization.weights import ReorderedPanelWeight
from scripts import of_two_processes
from tiny import tiny_llama

transformers = pytest.importorskip("transformers")
LEVELS = [each.name for each in isa.levels() if each.supported]
SEEDED = {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "repetition_penalty": 1.3, "seed": 7}


def _kept(model: Any, path: Path) -> llm.LanguageModel:
    oxytorch.save(model, path)
    found = oxytorch.load(path, verify=True)
    assert isinstance(found, llm.LanguageModel)
    return found


def _assert_same(model: Any, loaded: Any, batches: tuple[int, ...] = (1, 2)) -> None:
    """The same tokens: likeliest and drawn, in a prompt, in steps, and in recorded steps."""
    for batch in batches:
        given = prompt(batch)
        for options in ({}, SEEDED):
            found = [llm.generate(one, **given, max_new_tokens=24, **options)
                     for one in (model, loaded)]  # fmt: skip
            assert torch.equal(*found)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_generates_the_same(family: str, tmp_path: Path) -> None:
    model = llm.optimize(build(family), weights="int4", group_size=32)
    _assert_same(model, _kept(model, tmp_path / "model.oxy"))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "mixtral", "gpt_neox", "olmo2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_weights_too(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = llm.optimize(build(family), dtype=dtype)
    _assert_same(model, _kept(model, tmp_path / "model.oxy"))


FORMATS: dict[str, dict[str, Any]] = {
    "int8": {"weights": "int8"},
    "nf4": {"weights": "nf4", "group_size": 64},
    "fp8": {"weights": "fp8"},
    "int8-int8": {"weights": "int8", "activation_dtype": "int8"},
    "int4-int8": {"weights": "int4", "activation_dtype": "int8", "group_size": 32},
    "float32 int4": {"weights": "int4", "group_size": 32, "dtype": torch.float32},
    "int8 cache": {"kv_cache": "int8"},
    "fp32 cache": {"kv_cache": "fp32"},
    "a head of bf16": {"weights": "int4", "group_size": 32, "head": "bf16"},
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format(name: str, tmp_path: Path) -> None:
    model = llm.optimize(build("qwen3"), **FORMATS[name])
    _assert_same(model, _kept(model, tmp_path / "model.oxy"))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("weights", [None, "int4"])
def test_every_level(level: str, weights: str | None, tmp_path: Path) -> None:
    model = llm.optimize(tiny_llama(), weights=weights, group_size=32)
    oxytorch.save(model, tmp_path / "model.oxy")
    ids = torch.randint(64, (2, 9))
    with isa.use(level):
        loaded = oxytorch.load(tmp_path / "model.oxy")
        expected = llm.generate(model, ids, max_new_tokens=20)
        assert torch.equal(loaded.generate(ids, max_new_tokens=20), expected)


def test_models_that_were_quantized_before(tmp_path: Path) -> None:
    model = build("llama")
    oxytorch.quantize_(model, Int8Weight(), filter="*")
    order = {n: torch.randperm(n) for n in (64, 128)}
    for module in model.modules():  # as checkpoints of GPTQ with act-order are
        weight = getattr(module, "weight", None)
        if isinstance(module, nn.Linear) and isinstance(weight, PanelWeight):
            own = ReorderedPanelWeight(weight, False, order[weight.shape[1]])
            module.weight = nn.Parameter(own, requires_grad=False)
    model = llm.optimize(model)
    loaded = _kept(model, tmp_path / "model.oxy")
    assert loaded.record.layers[0].attention.qkv.order is not None
    assert isinstance(loaded.record.head, type(loaded.record.layers[0].attention.qkv))
    assert loaded.record.head.order is not None
    _assert_same(model, loaded)


def test_a_tied_head_is_stored_once(tmp_path: Path) -> None:
    for dtype, count in ((torch.float32, 1), (torch.bfloat16, 2)):
        model = llm.optimize(tiny_llama(tie_word_embeddings=True), dtype=dtype)
        loaded = _kept(model, tmp_path / "model.oxy")
        places = TensorFile(tmp_path / "model.oxy").places
        assert sum("embedding" in name or "head." in name for name in places) == count
        ids = torch.randint(64, (1, 5))
        expected = llm.generate(model, ids, max_new_tokens=20)
        assert torch.equal(loaded.generate(ids, max_new_tokens=20), expected)


def test_all_that_generate_offers(tmp_path: Path) -> None:
    model = llm.optimize(build("llama"), dtype=torch.float32)
    loaded = _kept(model, tmp_path / "model.oxy")
    ids = torch.randint(3, VOCABULARY, (1, 6)).repeat(1, 4)
    plain = llm.generate(model, ids, max_new_tokens=30)
    assert torch.equal(loaded.generate(ids, max_new_tokens=30, prompt_lookup=5), plain)
    columns = torch.stack([*loaded.stream(ids, max_new_tokens=30, capacity=80)], 1)
    assert torch.equal(columns, plain[:, ids.shape[1] :])
    seen: list[int] = []
    end = int(plain[0, 30])
    found = loaded.generate(
        ids, max_new_tokens=30, eos_token_id=end, streamer=lambda t: seen.append(int(t))
    )
    assert seen[-1] == end and torch.equal(found, plain[:, : found.shape[1]])
    text = torch.randint(3, VOCABULARY, (90,))
    assert llm.perplexity(loaded, text, 40, 20) == llm.perplexity(model, text, 40, 20)
    assert repr(loaded) == f"LanguageModel(2 layers, {VOCABULARY} tokens, float32)"
    for again in (copy.deepcopy(loaded), oxytorch.load(tmp_path / "model.oxy", shared=False)):
        assert torch.equal(again.generate(ids, max_new_tokens=30), plain)
    with pytest.raises(ValueError, match=r"more than the 256 positions"):
        loaded.generate(ids, max_new_tokens=240)
    with pytest.raises(ValueError, match=r"has the token 200, the model knows 0 to 199"):
        loaded.generate(torch.tensor([[200]]), max_new_tokens=2)


ANGLES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}


@pytest.mark.parametrize("name", ANGLES)
def test_angles_for_longer_texts(name: str, tmp_path: Path) -> None:
    """They reach beyond the positions that the configuration names."""
    rope = {"rope_theta": 1e4, **ANGLES[name]}
    model = tiny_llama(max_position_embeddings=256, rope_parameters=rope)
    model = llm.optimize(model)
    loaded = _kept(model, tmp_path / "model.oxy")
    assert loaded.positions is None
    ids = torch.randint(64, (1, 250))
    expected = llm.generate(model, ids, max_new_tokens=30)
    assert torch.equal(loaded.generate(ids, max_new_tokens=30), expected)


def test_threads_generate_at_once(tmp_path: Path) -> None:
    loaded = _kept(llm.optimize(build("gemma2")), tmp_path / "model.oxy")
    prompts = [torch.randint(3, VOCABULARY, (1, length)) for length in range(1, 9)]
    alone = [loaded.generate(ids, max_new_tokens=30) for ids in prompts]
    fresh = oxytorch.load(tmp_path / "model.oxy")
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda ids: fresh.generate(ids, max_new_tokens=30), prompts)]
    assert all(map(torch.equal, found, alone))


SETTINGS: dict[str, dict[str, Any]] = {
    "end and padding": {"eos_token_id": [*range(20, 60)], "pad_token_id": 3},
    "an end": {"eos_token_id": 77, "pad_token_id": None},
    "penalty": {"repetition_penalty": 1.7},
    "sampling, which is left": {"do_sample": True, "temperature": 0.3, "top_k": 4},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_the_model_are_kept(name: str, tmp_path: Path) -> None:
    model = build("llama")
    for key, value in SETTINGS[name].items():
        setattr(model.generation_config, key, value)
    model = llm.optimize(model)
    loaded = _kept(model, tmp_path / "model.oxy")
    for given in (prompt(3), {"input_ids": torch.randint(3, VOCABULARY, (1, 4))}):
        expected = llm.generate(model, **given, max_new_tokens=25)
        assert torch.equal(loaded.generate(**given, max_new_tokens=25), expected)


class Letters:
    """A tokenizer whose tokens are letters."""

    def decode(self, tokens: list[int], **options: Any) -> str:
        return "".join(chr(ord("a") + token % 26) for token in tokens)


def test_stop_strings_are_kept(tmp_path: Path) -> None:
    model = build("llama")
    model.generation_config.stop_strings = "e"
    model = llm.optimize(model)
    loaded = _kept(model, tmp_path / "model.oxy")
    ids = torch.tensor([[5, 9]])
    expected = llm.generate(model, ids, max_new_tokens=60, tokenizer=Letters())
    found = loaded.generate(ids, max_new_tokens=60, tokenizer=Letters())
    assert torch.equal(found, expected) and Letters().decode(found[0].tolist()).endswith("e")
    with pytest.raises(ValueError, match=r"stop 'e' is text: give the model's tokenizer"):
        loaded.generate(ids, max_new_tokens=60)


def test_values_that_were_written_are_in_the_file(tmp_path: Path) -> None:
    model = llm.optimize(build("qwen3"), dtype=torch.float32)
    before = llm.generate(model, **prompt(), max_new_tokens=20)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5 + torch.rand(parameter.shape))
    loaded = _kept(model, tmp_path / "model.oxy")
    assert not torch.equal(llm.generate(loaded, **prompt(), max_new_tokens=20), before)
    _assert_same(model, loaded)


def test_a_loaded_model_is_saved_again(tmp_path: Path) -> None:
    model = llm.optimize(build("llama"), weights="int4", group_size=32)
    path = tmp_path / "model.oxy"
    first = _kept(model, path)
    again = _kept(first, path)  # over the file that it maps
    _assert_same(first, again)
    oxytorch.save(again, tmp_path / "copy.oxy")
    files = [TensorFile(each) for each in (path, tmp_path / "copy.oxy")]
    assert files[0].metadata == files[1].metadata


def test_the_order_of_panels_belongs_to_the_version() -> None:
    """Files hold weights in this order. Who changes it writes another version, and reads both."""
    codes = (torch.arange(40 * 128).reshape(40, 128) % 251).to(torch.uint8)
    found = {
        name: hashlib.sha256(pack_panels(codes % most, name).numpy().tobytes()).hexdigest()[:16]
        for name, most in (("int8", 251), ("int4", 16), ("nf4", 16), ("fp8", 251))
    }
    assert VERSIONS == ("1",) and found == {
        "int8": "1d284a1443bb71c6",
        "int4": "3b9ae55a4096b94c",
        "nf4": "3b9ae55a4096b94c",
        "fp8": "1d284a1443bb71c6",
    }


FRESH = """
import sys
sys.modules["transformers"] = None  # importing it is an error
import torch, oxytorch
model = oxytorch.load(sys.argv[1])
ids, wanted = torch.load(sys.argv[2])
assert torch.equal(model.generate(ids, max_new_tokens=24), wanted)
assert model.generate(ids, max_new_tokens=3, temperature=1.0, top_k=5).shape[1] == 24
print("has run", flush=True)
sys.stdin.readline()
strange = {"sympy", "torch._dynamo", "torch._inductor", "oxytorch.llm.optimize"} & set(sys.modules)
assert not strange, strange
size, is_ours = {}, False
for line in open("/proc/self/smaps"):
    head = line.split()
    if not head[0].endswith(":"):
        is_ours = line.rstrip().endswith(sys.argv[1])
    elif is_ours and head[1].isdigit():
        size[head[0]] = size.get(head[0], 0) + int(head[1])
assert size["Anonymous:"] == 0, size  # pages that were written to and copied
print(size["Rss:"])
"""


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="it reads Linux's smaps")
def test_processes_without_transformers_share_the_weights(tmp_path: Path) -> None:
    path, given = tmp_path / "model.oxy", tmp_path / "given"
    model = llm.optimize(build("mistral"), weights="int8")
    oxytorch.save(model, path)
    ids = torch.randint(3, VOCABULARY, (2, 21))
    torch.save((ids, llm.generate(model, ids, max_new_tokens=24)), given)
    command = [sys.executable, "-c", FRESH, str(path), str(given)]
    for resident in of_two_processes(command):
        assert resident * 1024 >= path.stat().st_size * 0.8


class Doubled(nn.Embedding):
    """An embedding with code of its own."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens).flip(-1)


def test_what_no_file_holds_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.oxy"

    def refused(model: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            oxytorch.save(model, path)
        assert not path.exists()

    refused(
        llm.optimize(build("jamba")),
        r"save: expected a language model whose steps llm.optimize knows as a whole, got a "
        r"JambaForCausalLM: .*no attention among .*; oxytorch.save_quantized",
    )
    refused(llm.optimize(build("bloom")), "got a BloomForCausalLM: .*no activation")
    config: dict[str, Any] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    dynamic = llm.optimize(tiny_llama(rope_parameters=config))
    refused(dynamic, "rotary embedding, a LlamaRotaryEmbedding, depend on the length of the text")
    hooked = llm.optimize(tiny_llama())
    handle = hooked.model.layers[0].register_forward_hook(lambda *_: None)
    refused(hooked, "as llm.optimize left it, got one that was changed since")
    handle.remove()
    oxytorch.save(hooked, path)
    path.unlink()
    for name, value, message in (
        ("no_repeat_ngram_size", 3, r"transformers' code \(NoRepeatNGramLogitsProcessor\)"),
        ("min_new_tokens", 3, "MinNewTokensLength"),
        ("num_beams", 3, "expected num_beams 1 in the model's generation_config, got 3"),
    ):
        setattr(hooked.generation_config, name, value)
        refused(hooked, message)
        setattr(hooked.generation_config, name, None)
    with pytest.raises(TypeError, match=r"what oxytorch.llm.optimize returned is saved as it is"):
        oxytorch.save(tiny_llama(), path)


def test_embeddings_and_angles_of_their_own_are_refused(tmp_path: Path) -> None:
    model = tiny_llama()
    own = Doubled(64, 64)
    own.weight = model.model.embed_tokens.weight
    model.model.embed_tokens = own
    with pytest.raises(ValueError, match="its embedding, a Doubled, computes something else"):
        oxytorch.save(llm.optimize(model), tmp_path / "model.oxy")
    model = tiny_llama()
    rotary = model.model.rotary_emb
    kind = type(rotary)
    rotary.__class__ = type("Own", (kind,), {"forward": _slower_angles})
    with pytest.raises(ValueError, match="not known how its rotary embedding, a Own"):
        oxytorch.save(llm.optimize(model), tmp_path / "model.oxy")


def _slower_angles(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    angles = (position_ids[..., None].float() * 0.9) ** 1.01 * self.inv_freq
    angles = torch.cat([angles, angles], -1)
    return angles.cos().to(x.dtype), angles.sin().to(x.dtype)
