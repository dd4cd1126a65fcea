"""`oxytorch llm generate`: text to the terminal, numbers beside it, clear mistakes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch

from oxytorch import llm
from oxytorch.__main__ import main
from oxytorch.llm_command.generate import TextPrinter
from oxytorch.llm_command.model import PreparedModel, token_reads
from oxytorch.llm_command.options import PRECISIONS
from tiny import tiny_llama

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

WORDS = ["<end>", "<start>", *"abcdefghijklmnopqrstuvwxyz .,"]


def _tokenizer():
    """One letter a token."""
    plain = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token=".")
    )
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    plain.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, eos_token="<end>", bos_token="<start>", unk_token="."
    )


def _model():
    torch.manual_seed(0)
    return tiny_llama(
        vocab_size=len(WORDS), max_position_embeddings=128, initializer_range=0.3,
        eos_token_id=0, bos_token_id=1,
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    _model().to(torch.bfloat16).save_pretrained(path)
    _tokenizer().save_pretrained(path)
    return path


def test_text_streams_and_numbers_follow(folder, tmp_path, capsys):
    numbers = tmp_path / "speed.json"
    words = ["llm", "generate", str(folder), "--prompt", "once upon a", "--max-new-tokens", "12"]
    assert main([*words, "--json", str(numbers)]) == 0
    shown = capsys.readouterr()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model = llm.optimize(loaded.eval())
    tokenizer = _tokenizer()
    ids = torch.tensor([tokenizer("once upon a")["input_ids"]])
    expected = llm.generate(model, ids, max_new_tokens=12)[0, ids.shape[1] :]
    assert shown.out == tokenizer.decode(expected, skip_special_tokens=True) + "\n"
    assert "first token after" in shown.err and "of the" in shown.err
    speed = json.loads(numbers.read_text())
    assert speed["prompt_tokens"] == ids.shape[1] and speed["new_tokens"] == len(expected)
    assert speed["token_bytes"] == sum(token_reads(model))
    assert speed["bandwidth"] == pytest.approx(speed["token_bytes"] / speed["token_seconds"])


def test_options_reach_the_loop(folder, capsys):
    words = ["llm", "generate", str(folder), "--prompt", "abc", "--max-new-tokens", "30"]
    options = ["--weights", "int4", "--group-size", "32", "--kv-cache", "int8"]
    assert main([*words, *options]) == 0
    free = capsys.readouterr().out
    stop = free[3:5]
    assert main([*words, *options, "--stop", stop]) == 0
    assert capsys.readouterr().out == free[: free.index(stop) + 2] + "\n"
    drawn = []
    for seed in ("1", "1", "2"):
        main([*words, *options, "--temperature", "2", "--seed", seed])
        drawn.append(capsys.readouterr().out)
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_file_takes_the_place_of_the_folder(folder, tmp_path, capsys):
    path, speed = tmp_path / "model.oxy", tmp_path / "speed.json"
    options = ["--prompt", "abc", "--max-new-tokens", "30"]
    first = ["llm", "generate", str(folder), *options, "--weights", "int4", "--group-size", "32"]
    assert main([*first, "--save", str(path)]) == 0
    written = capsys.readouterr()
    assert f"wrote {path}" in written.err
    again = ["llm", "generate", str(path), "--tokenizer", str(folder), *options]
    assert main([*again, "--json", str(speed)]) == 0
    shown = capsys.readouterr()
    assert shown.out == written.out and "int4 weights read at" in shown.err
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model = llm.optimize(loaded.eval(), weights="int4", group_size=32)
    assert json.loads(speed.read_text())["token_bytes"] == sum(token_reads(model))
    told = _refused([path, "--prompt", "abc"], capsys)
    assert "has no tokenizer; give --tokenizer with its folder" in told
    for option, value in (("--weights", "int8"), ("--kv-cache", "int8"), ("--group-size", "64")):
        told = _refused([path, *again[3:], option, value], capsys)
        assert f"{option}: {path} was packed when it was written" in told
    path.write_bytes(path.read_bytes()[:-1])
    assert "expected" in _refused([path, *again[3:]], capsys)


def _refused(words, capsys) -> str:
    assert main(["llm", "generate", *map(str, words)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    return shown.err


def test_mistakes_are_named(folder, tmp_path, capsys):
    prompt = ["--prompt", "abc"]
    assert "does not exist" in _refused([tmp_path / "absent", *prompt], capsys)
    assert "is not a model" in _refused([tmp_path, *prompt], capsys)
    assert "is empty" in _refused([folder, "--prompt", ""], capsys)
    assert "more than the 128 positions" in _refused([folder, "--prompt", "a" * 120], capsys)
    told = _refused([folder, *prompt, "--context", "8", "--max-new-tokens", "6"], capsys)
    assert "--context: a prompt of 3 tokens and 6 new ones do not fit 8 positions" in told
    assert "give --context 9 or more" in told
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"caf\xe9")
    told = _refused([folder, "--prompt-file", bad], capsys)
    assert f"--prompt-file: {bad} is not UTF-8 text (byte 3)" in told
    assert "no chat template" in _refused([folder, *prompt, "--chat"], capsys)
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    (broken / "chat_template.jinja").write_text("{% if %}")
    assert "TemplateSyntaxError in line 1" in _refused([broken, *prompt, "--chat"], capsys)
    assert "temperature >= 0" in _refused([folder, *prompt, "--temperature", "-1"], capsys)


def test_folders_that_cannot_be_loaded_are_named(folder, tmp_path, capsys):
    def changed(name):
        copy = tmp_path / name
        shutil.copytree(folder, copy)
        return copy

    prompt = ["--prompt", "abc"]
    encoder = changed("encoder")
    config = json.loads((encoder / "config.json").read_text())
    (encoder / "config.json").write_text(json.dumps({**config, "architectures": ["BertModel"]}))
    assert "architecture BertModel" in _refused([encoder, *prompt], capsys)
    pickled = changed("pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    assert "pickled" in _refused([pickled, *prompt], capsys)
    broken = changed("broken")
    (broken / "config.json").write_text("{")
    assert "expected a file in JSON" in _refused([broken, *prompt], capsys)
    speechless = changed("speechless")
    (speechless / "tokenizer.json").unlink()
    (speechless / "tokenizer_config.json").unlink()
    assert "no tokenizer" in _refused([speechless, *prompt], capsys)
    wide = changed("wide")
    (wide / "config.json").write_text(json.dumps({**config, "intermediate_size": 256}))
    assert "mlp" in _refused([wide, *prompt], capsys)
    deep = changed("deep")
    (deep / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    assert "missing weights model.layers.2" in _refused([deep, *prompt], capsys)
    cut = changed("cut")
    weights = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    assert "file not fully covered" in _refused([cut, *prompt], capsys)


def test_unknown_precision_names_the_choices(folder, mistake):
    shown = mistake(["llm", "generate", str(folder), "--prompt", "a", "--weights", "int3"])
    assert "int3" in shown and all(name in shown for name in PRECISIONS)


@pytest.mark.parametrize("weights", ["bf16", "int8", "fp8"])
@pytest.mark.parametrize("kind", ["gpt2", "mixtral", "phi3"])
def test_weights_in_another_order_are_counted(kind, weights, tmp_path, capsys):
    sizes = {"vocab_size": len(WORDS), "eos_token_id": 0, "bos_token_id": 1}
    wide = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    wide |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    config = {
        "gpt2": lambda: transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, **sizes),
        "mixtral": lambda: transformers.MixtralConfig(num_local_experts=4, **wide, **sizes),
        "phi3": lambda: transformers.Phi3Config(**wide, **sizes),
    }[kind]()
    model = transformers.AutoModelForCausalLM.from_config(config).eval().to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    _tokenizer().save_pretrained(tmp_path)
    words = ["llm", "generate", str(tmp_path), "--prompt", "abc", "--max-new-tokens", "6"]
    assert main([*words, "--weights", weights]) == 0
    assert f"{weights} weights read at" in capsys.readouterr().err
    linear = [p for name, p in model.named_parameters() if p.dim() > 1 and "emb" not in name]
    numbers = sum(p.numel() for p in linear if p.shape[-1] > 4)
    numbers -= sum(model.get_input_embeddings().weight.numel() for _ in range(kind == "gpt2"))
    found = token_reads(PreparedModel.from_model(model, PRECISIONS["bf16"], "bf16", 32).model)
    assert 0.5 * 2 * numbers < sum(found) < 1.1 * 2 * numbers + 2 * 2 * 64 * 64


def test_reads_of_a_token_are_the_packed_matrices():
    sizes = {}
    for name in ("bf16", "int8", "int4"):
        model = PreparedModel.from_model(_model(), PRECISIONS[name], "bf16", 32).model
        sizes[name] = sum(token_reads(model))
    layer = (64 + 2 * 32 + 64) * 64 + 3 * 128 * 64
    head = 32 * 64  # panels of 16 outputs
    assert sizes["bf16"] == 2 * (2 * layer + head)
    prepared = PreparedModel.from_model(_model(), PRECISIONS["int8"], "bf16", 32)
    assert prepared.prompt_operations(10) == 2 * (10 * 2 * layer + len(WORDS) * 64)
    assert sizes["int8"] < 0.55 * sizes["bf16"] and sizes["int4"] < 0.6 * sizes["int8"] + 2000


def test_printer_waits_for_whole_characters():
    class Bytes:
        def decode(self, tokens, skip_special_tokens):
            return bytes(tokens).decode("utf-8", errors="replace")

    written = []
    printer = TextPrinter(Bytes(), written.append)
    for byte in "héllo — ok".encode():
        printer.put([byte])
    printer.end()
    assert "".join(written) == "héllo — ok"
    assert "é" in written and "—" in written


def test_quantized_folders_keep_their_weights(folder, tmp_path, capsys):
    import oxytorch

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    oxytorch.quantize_(model, oxytorch.quantization.Int8Weight())
    packed = tmp_path / "packed"
    oxytorch.save_quantized(model, packed)
    _tokenizer().save_pretrained(packed)
    words = ["llm", "generate", str(packed), "--prompt", "abc", "--max-new-tokens", "6"]
    assert main(words) == 0
    shown = capsys.readouterr()
    assert "int8 weights read at" in shown.err
    ids = torch.tensor([_tokenizer()("abc")["input_ids"]])
    expected = llm.generate(llm.optimize(model), ids, max_new_tokens=6)[0, 3:]
    assert shown.out == _tokenizer().decode(expected, skip_special_tokens=True) + "\n"
    told = _refused([*words[2:], "--weights", "int4"], capsys)
    assert "is quantized already and runs as it is" in told


@pytest.mark.parametrize("verb", ["generate", "perplexity", "bench"])
def test_files_that_cannot_be_written_are_told_first(verb, folder, tmp_path, mistake):
    given = {"generate": ["--prompt", "a"], "perplexity": ["--text", str(folder)], "bench": []}
    for path, text in ((tmp_path / "no" / "f.json", "found no"), (tmp_path, "found a folder")):
        assert text in mistake(["llm", verb, str(folder), *given[verb], "--json", str(path)])


def test_a_reader_that_leaves_ends_it_quietly(folder):
    words = [
        "-m",
        "oxytorch",
        "llm",
        "generate",
        str(folder),
        "--prompt",
        "abc",
        "--max-new-tokens",
        "99",
    ]
    made = subprocess.Popen(
        [sys.executable, *words, "--weights", "int8"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    made.stdout.close()
    told = made.stderr.read()
    assert made.wait() == 141
    assert "Broken pipe" not in told and "Traceback" not in told
