"""Quantized models on disk: what comes back, how it lies in memory, and what damage is told."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import oxytorch
from oxytorch.ops.panels import PanelWeight
from oxytorch.quantization import (
    CheckpointError,
    Int4Weight,
    Int8Weight,
    WeightConfig,
    joining,
)
from tiny import tiny_llama
from weight_configs import MOST_ERROR

Make = Callable[[], nn.Module]
FOUR_BITS = Int4Weight()


def saved(directory: Path, make: Make, config: WeightConfig = FOUR_BITS) -> Any:
    model = make()
    oxytorch.quantize_(model, config)
    oxytorch.save_quantized(model, directory)
    return model


@pytest.mark.parametrize("config", MOST_ERROR, ids=repr)
def test_a_model_comes_back_bit_for_bit(
    tmp_path: Path, make_small: Make, ids: torch.Tensor, config: Any
) -> None:
    model = saved(tmp_path, make_small, config)
    again: Any = oxytorch.load_quantized(tmp_path, make_small).eval()
    with torch.no_grad():
        assert torch.equal(again(ids), model(ids))
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)
    assert again.up.weight.activation_dtype == config.activation_dtype
    layers = oxytorch.explain(again).layers  # type: ignore[attr-defined]
    assert layers == oxytorch.explain(model).layers  # type: ignore[attr-defined]
    oxytorch.undo(again)
    assert type(again.up.weight) is nn.Parameter
    assert torch.equal(again.up.weight, model.up.weight.dense())


def test_dtype_of_what_is_not_quantized_can_be_chosen(tmp_path: Path, make_small: Make) -> None:
    saved(tmp_path, make_small)
    model: Any = oxytorch.load_quantized(tmp_path, make_small, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.steps.dtype == torch.int64
    with torch.no_grad():
        assert model.up(torch.ones(1, 256, dtype=torch.bfloat16)).dtype == torch.bfloat16


def _mapped_at(address: int) -> str:
    """The file whose memory lies at an address of this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= address < end:
            return line.split(maxsplit=5)[5] if len(line.split()) > 5 else ""
    return ""


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no /proc/self/maps")
def test_weights_are_mapped_and_begin_at_64_bytes(
    tmp_path: Path, make_small: Make, ids: torch.Tensor
) -> None:
    saved(tmp_path, make_small)
    model: Any = oxytorch.load_quantized(tmp_path, make_small)
    file = str((tmp_path / "oxytorch.safetensors").resolve())
    for weight in (model.up.weight, model.down.weight):
        for tensor in (weight.packed, weight.channel_scales):
            assert tensor.data_ptr() % 64 == 0
            assert _mapped_at(tensor.data_ptr()) == file
    assert _mapped_at(model.table.weight.data_ptr()) == file
    with torch.no_grad():
        model(ids)
    maps = Path("/proc/self/smaps").read_text().split(file)
    copied = [re.search(r"Anonymous: +(\d+) kB", part) for part in maps[1:]]
    assert copied and all(found and found[1] == "0" for found in copied)


def test_a_quantized_model_takes_other_weights(
    tmp_path: Path, make_small: Make, ids: torch.Tensor
) -> None:
    model = saved(tmp_path, make_small)
    other: Any = make_small()
    oxytorch.quantize_(other, Int8Weight())
    oxytorch.load_quantized(tmp_path, other)
    with torch.no_grad():
        assert torch.equal(other(ids), model(ids))
    oxytorch.undo(other)
    assert "forward" not in other.up.__dict__ and not other.up._state_dict_hooks
    assert torch.equal(other.up.weight, model.up.weight.dense())
    better = oxytorch.optimize(other, sample_input=ids)
    with pytest.raises(ValueError, match=r"call oxytorch\.undo\(model\) first"):
        oxytorch.load_quantized(tmp_path, better)


def test_weights_can_be_copied_from_the_file(
    tmp_path: Path, make_small: Make, ids: torch.Tensor
) -> None:
    model = saved(tmp_path, make_small)
    again: Any = oxytorch.load_quantized(tmp_path, make_small, shared=False)
    file = str((tmp_path / "oxytorch.safetensors").resolve())
    assert _mapped_at(again.up.weight.packed.data_ptr()) != file
    with torch.no_grad():
        assert torch.equal(again(ids), model(ids))


def test_writing_to_a_mapped_weight_leaves_the_file(tmp_path: Path, make_small: Make) -> None:
    saved(tmp_path, make_small)
    before = (tmp_path / "oxytorch.safetensors").read_bytes()
    model: Any = oxytorch.load_quantized(tmp_path, make_small)
    with torch.no_grad():
        model.up.weight.zero_()
        model.table.weight.zero_()
    assert (tmp_path / "oxytorch.safetensors").read_bytes() == before


def test_a_model_can_be_saved_to_where_it_came_from(tmp_path: Path, make_small: Make) -> None:
    model = saved(tmp_path, make_small)
    again: Any = oxytorch.load_quantized(tmp_path, make_small)
    oxytorch.save_quantized(again, tmp_path)
    third: Any = oxytorch.load_quantized(tmp_path, make_small)
    for each in (again, third):
        assert torch.equal(each.up.weight.dense(), model.up.weight.dense())
    assert sorted(os.listdir(tmp_path)) == ["oxytorch.json", "oxytorch.safetensors"]


def test_safetensors_reads_the_file(tmp_path: Path, make_small: Make) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model = saved(tmp_path, make_small)
    found = safetensors.load_file(tmp_path / "oxytorch.safetensors")
    assert torch.equal(found["table.weight"], model.table.weight)
    for name, tensor in model.up.weight.tensors().items():
        assert torch.equal(found[f"up.weight.{name}"], tensor)


def test_a_model_of_transformers_needs_nothing_but_the_directory(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 32}
    gpt2 = transformers.GPT2Config(
        n_embd=64, n_layer=1, n_head=2, vocab_size=32, bos_token_id=1, eos_token_id=2
    )
    ids = torch.arange(6)[None]
    for index, (kind, config) in enumerate(
        [
            (transformers.LlamaForCausalLM, transformers.LlamaConfig(**small, **heads)),
            (transformers.GPT2LMHeadModel, gpt2),
        ]
    ):
        model = kind(config).eval()
        oxytorch.quantize_(model, Int8Weight())
        oxytorch.save_quantized(model, tmp_path / str(index))
        again: Any = oxytorch.load_quantized(tmp_path / str(index))
        assert type(again) is kind and not again.training
        with torch.no_grad():
            assert torch.equal(again(ids).logits, model(ids).logits)
        tied = model.get_input_embeddings().weight is model.lm_head.weight
        assert (again.get_input_embeddings().weight is again.lm_head.weight) == tied
        assert again.generate(ids, max_new_tokens=2, do_sample=False).shape == (1, 8)


def test_a_quantized_head_stays_apart_from_its_embedding(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=32, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    oxytorch.quantize_(model, Int8Weight(), filter=["model.layers", "lm_head"])
    oxytorch.save_quantized(model, tmp_path)
    again: Any = oxytorch.load_quantized(tmp_path)
    assert type(again.lm_head.weight) is PanelWeight
    assert torch.equal(again.model.embed_tokens.weight, model.model.embed_tokens.weight)
    ids = torch.arange(6)[None]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)


class Joined(nn.Module):
    """Layers whose weights are parts of joined ones, as `oxytorch.llm.optimize` leaves them."""

    def __init__(self, is_joined: bool = True) -> None:
        super().__init__()
        for name, rows in (("q", 64), ("k", 32), ("v", 40), ("gate", 48), ("up", 48), ("o", 64)):
            self.add_module(name, nn.Linear(64, rows, bias=False))
        if is_joined:
            oxytorch.quantize_(self, Int4Weight(group_size=32))
            self.join(["q", "k", "v"], False)
            self.join(["gate", "up"], True)

    def join(self, names: list[str], gated: bool) -> None:
        layers = [self.get_submodule(name) for name in names]
        weights: Any = [layer.weight for layer in layers]
        whole = PanelWeight.gated(*weights) if gated else PanelWeight.joined(weights)
        begin = 0
        for layer in layers:
            end = begin + layer.weight.shape[0]
            layer.weight = whole.part(begin, end).as_parameter(False)
            begin = end


def test_joined_weights_are_written_once_and_stay_joined(tmp_path: Path) -> None:
    model: Any = Joined()
    plain = {name: layer.weight.dense() for name, layer in model.named_children()}
    oxytorch.save_quantized(model, tmp_path)
    description = json.loads((tmp_path / "oxytorch.json").read_text())
    assert set(description["joined"]) == {"q.weight+2", "gate.weight+1"}
    size = sum(layer.weight.nbytes_packed() for layer in model.children())
    assert (tmp_path / "oxytorch.safetensors").stat().st_size < size + 4096
    again: Any = oxytorch.load_quantized(tmp_path, lambda: Joined(False))
    for name, values in plain.items():
        assert torch.equal(again.get_submodule(name).weight.dense(), values)
    for names, gated in ((["q", "k", "v"], False), (["gate", "up"], True)):
        parts = [again.get_submodule(name).weight for name in names]
        whole = joining.whole_of(parts, gated)
        assert whole is not None
        assert whole.packed.data_ptr() == parts[0].packed.data_ptr()
        assert torch.equal(whole.dense(), torch.cat([plain[name] for name in names]))
    x = torch.randn(3, 64)
    with torch.no_grad():
        for name in plain:
            assert torch.equal(again.get_submodule(name)(x), model.get_submodule(name)(x))


def test_weights_that_are_apart_are_not_joined() -> None:
    model: Any = Joined()
    q, k, v, gate, up, o = (layer.weight for layer in model.children())
    assert joining.whole_of([k, q]) is None
    assert joining.whole_of([q, v]) is None
    assert joining.whole_of([q, o]) is None
    assert joining.whole_of([up, gate], True) is None
    assert joining.whole_of([gate, up], False) is None
    assert joining.whole_of([q], False) is None
    assert [len(parts) for _, parts in joining.joined_groups([o, v, up, k, gate, q])] == [3, 2]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_stay_joined(copied: Callable[[Any], Any]) -> None:
    model: Any = Joined()
    again = copied(model)
    for names, gated in ((["q", "k", "v"], False), (["gate", "up"], True)):
        parts = [again.get_submodule(name).weight for name in names]
        whole = joining.whole_of(parts, gated)
        assert whole is not None
        with torch.no_grad():
            parts[1].zero_()
        rows = parts[0].shape[0]
        assert not whole.dense()[rows : rows + parts[1].shape[0]].any()
        assert torch.equal(whole.dense()[:rows], model.get_submodule(names[0]).weight.dense())


def test_a_part_with_values_of_its_own_is_joined_no_more() -> None:
    model: Any = Joined()
    model.k.weight = model.k.weight.copy().as_parameter(False)
    assert joining.whole_of([model.q.weight, model.k.weight]) is None
    groups = joining.joined_groups([model.q.weight, model.k.weight, model.v.weight])
    assert groups == []


def _description(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        path = directory / "oxytorch.json"
        values = json.loads(path.read_text())
        change(values)
        path.write_text(json.dumps(values))

    return damage


def _tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        from safetensors.torch import load_file, save_file

        tensors = {n: t.clone() for n, t in load_file(directory / "oxytorch.safetensors").items()}
        change(tensors)
        save_file(tensors, directory / "oxytorch.safetensors")

    return damage


def _flip(directory: Path) -> None:
    path = directory / "oxytorch.safetensors"
    content = bytearray(path.read_bytes())
    content[-7] ^= 1
    path.write_bytes(content)


DAMAGES = [
    (lambda d: (d / "oxytorch.json").write_text("{"), "expected a file in JSON"),
    (lambda d: (d / "oxytorch.json").write_text("[]"), "expected an object in JSON"),
    (lambda d: (d / "oxytorch.safetensors").unlink(), "expected a file, found none"),
    (lambda d: (d / "oxytorch.safetensors").write_bytes(b""), "is truncated or of another kind"),
    (_flip, "to have the sha256 of oxytorch.json, got another"),
    (_description(lambda v: v.update(version=9)), "of version 2, got 'oxytorch.quantized' of"),
    (_description(lambda v: v.update(weights=[])), "expected weights to be a dict, got []"),
    (_description(lambda v: v["weights"]["up.weight"].pop("shape")), "'up.weight' to fit its"),
    (_description(lambda v: v["weights"]["up.weight"].update(shape=[3])), "'up.weight' to fit"),
    (
        _description(lambda v: v["weights"]["up.weight"].update(format="int5")),
        "expected format in",
    ),
    (
        _description(lambda v: v["weights"]["up.weight"].update(dtype="load")),
        "expected weight 'up.weight' to fit its tensors",
    ),
    (
        _description(lambda v: v["weights"]["up.weight"].update(joined="x")),
        "expected weight 'up.weight' to fit its tensors",
    ),
    (
        _description(lambda v: v["weights"].update(more=v["weights"].pop("up.weight"))),
        "expected weight 'more' to fit its tensors",
    ),
    (_description(lambda v: v["shared"].update(x="up.bias")), "got 'x', which Small does not"),
    (_tensors(lambda t: t.pop("up.bias")), "found none for 'up.bias'"),
    (_tensors(lambda t: t.pop("up.weight.panels")), "'up.weight' to fit its tensors"),
    (_tensors(lambda t: t.update(more=torch.ones(1))), "got 'more', which Small does not have"),
    (_tensors(lambda t: t.update({"up.bias": torch.ones(3)})), "'up.bias' of shape [128], got [3]"),
    (
        _tensors(lambda t: t["up.weight.group_scales"].fill_(torch.inf)),
        "finite values in tensor 'up.weight.group_scales'",
    ),
]


@pytest.mark.parametrize(("damage", "text"), DAMAGES)
def test_damage_is_named_and_the_model_stays(
    tmp_path: Path, make_small: Make, damage: Callable[[Path], object], text: str
) -> None:
    saved(tmp_path, make_small)
    damage(tmp_path)
    model = make_small()
    before = dict(model.named_parameters())
    with pytest.raises(CheckpointError) as caught:
        oxytorch.load_quantized(tmp_path, model)
    assert text in str(caught.value)
    assert all(value is before[name] for name, value in model.named_parameters())
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_verifying_can_be_left_out(tmp_path: Path, make_small: Make) -> None:
    saved(tmp_path, make_small)
    _flip(tmp_path)
    oxytorch.load_quantized(tmp_path, make_small, verify=False)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_altered_files_give_errors_and_no_crash(
    tmp_path: Path, make_small: Make, data: st.DataObject
) -> None:
    if not (tmp_path / "oxytorch.json").exists():
        saved(tmp_path, make_small)
        (tmp_path / "kept").write_bytes((tmp_path / "oxytorch.safetensors").read_bytes())
    content = bytearray((tmp_path / "kept").read_bytes())
    header = int.from_bytes(content[:8], "little") + 8
    if data.draw(st.booleans(), label="truncated"):
        del content[data.draw(st.integers(0, len(content) - 1), label="at") :]
    else:
        place = data.draw(st.integers(0, header - 1), label="place")
        content[place] ^= data.draw(st.integers(1, 255), label="bits")
    # A new file each time: one that is mapped must not be written to.
    (tmp_path / "oxytorch.safetensors").unlink()
    (tmp_path / "oxytorch.safetensors").write_bytes(content)
    try:
        oxytorch.load_quantized(tmp_path, make_small)
    except CheckpointError as error:
        assert str(tmp_path) in str(error)
    else:
        # Only spaces after the header, or the names of what is not looked at, may change unseen.
        assert len(content) == (tmp_path / "kept").stat().st_size


def test_directories_that_are_no_model_are_told(tmp_path: Path, make_small: Make) -> None:
    with pytest.raises(CheckpointError, match="expected a directory, found none"):
        oxytorch.load_quantized(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"expected oxytorch\.json or config\.json"):
        oxytorch.load_quantized(tmp_path)
    (tmp_path / "config.json").write_text(
        '{"quantization_config": {"quant_method": "awq", "bits": 4}}'
    )
    with pytest.raises(CheckpointError, match="found no safetensors files; files in pickle"):
        oxytorch.load_quantized(tmp_path, make_small)
    (tmp_path / "pytorch_model.bin").write_bytes(b"anything")
    with pytest.raises(CheckpointError, match="in pickle format are not read"):
        oxytorch.load_quantized(tmp_path, make_small)
    (tmp_path / "config.json").unlink()
    saved(tmp_path, make_small)
    with pytest.raises(ValueError, match=r"expected model, because .* holds a Small"):
        oxytorch.load_quantized(tmp_path)
    with pytest.raises(ValueError, match="expected dtype float32, bfloat16"):
        oxytorch.load_quantized(tmp_path, make_small, dtype=torch.int8)
    with pytest.raises(TypeError, match=r"to be a torch\.nn\.Module or to make one, got a int"):
        oxytorch.load_quantized(tmp_path, lambda: 3)  # type: ignore[arg-type, return-value]
    with pytest.raises(TypeError, match=r"expected model to be a torch\.nn\.Module, got a str"):
        oxytorch.save_quantized("model", tmp_path)  # type: ignore[arg-type]


def test_unknown_language_models_are_told(tmp_path: Path) -> None:
    model = tiny_llama(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, vocab_size=8,
    )  # fmt: skip
    oxytorch.quantize_(model, Int8Weight())
    oxytorch.save_quantized(model, tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    for change, text in (
        ({"model_type": "unheard"}, "a model_type that transformers .* knows, got 'unheard'"),
        ({"architectures": ["os"]}, "architectures to name a model of transformers"),
        ({"hidden_size": "wide"}, "makes no model of it"),
        ({"vocab_size": 9}, r"shape \[9, 32\], got \[8, 32\]"),
    ):
        path.write_text(json.dumps({**values, **change}))
        with pytest.raises(CheckpointError, match=text):
            oxytorch.load_quantized(tmp_path)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no /proc/self/maps")
def test_optimizing_a_loaded_language_model_copies_no_weights(tmp_path: Path) -> None:
    model = tiny_llama(num_attention_heads=2, num_key_value_heads=1)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    model = oxytorch.llm.optimize(model, weights=Int4Weight(group_size=64))
    ids = torch.arange(6)[None]
    with torch.no_grad():
        wanted = model(ids).logits
    oxytorch.save_quantized(model, tmp_path)
    again = oxytorch.llm.optimize(oxytorch.load_quantized(tmp_path), inplace=True)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, wanted)
    file = str((tmp_path / "oxytorch.safetensors").resolve())
    parts = [
        module.weight
        for path, module in again.named_modules()  # type: ignore[attr-defined]
        if path.startswith("model.layers") and isinstance(module, nn.Linear)
    ]
    assert len(parts) == 14
    assert all(_mapped_at(part.packed.data_ptr()) == file for part in parts)


def test_a_model_of_which_nothing_is_quantized_is_refused(small: Any, tmp_path: Any) -> None:
    with pytest.raises(ValueError, match=r"call oxytorch\.quantize_\(model, \.\.\.\) first"):
        oxytorch.quantization.save_quantized(small, tmp_path / "model")
    assert not (tmp_path / "model").exists()
