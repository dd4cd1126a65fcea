"""Files of language models that are damaged, foreign, newer or forged: refused, never a crash."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from language_models import build
from torch import Tensor

import oxytorch
from forged_files import forge
from oxytorch import llm
from oxytorch.core.tensor_file import Source, TensorFile, write
from oxytorch.program import files as programs
from oxytorch.quantization import CheckpointError

pytest.importorskip("transformers")

_saved: dict[str, bytes] = {}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "int4": ("qwen3", {"weights": "int4", "group_size": 32}),
    "experts": ("mixtral", {"weights": "int8"}),
    "positions": ("opt", {"dtype": torch.float32}),
}


def _written(name: str, folder: Path) -> Path:
    path = folder / "model.oxy"
    if name not in _saved:
        family, options = MODELS[name]
        oxytorch.save(llm.optimize(build(family), **options), path)
        _saved[name] = path.read_bytes()
    path.write_bytes(_saved[name])
    return path


@pytest.fixture(params=MODELS)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return _written(request.param, tmp_path)


def _run(path: Path) -> Tensor:
    found: Tensor = oxytorch.load(path).generate(torch.tensor([[3, 9, 14]]), max_new_tokens=2)
    return found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(format="oxytorch.movie"), "that oxytorch.save wrote, got a safetenso"),
        (lambda m: m.update(version="2"), "expected version 1, got '2'; a newer oxytorch may read"),
        (lambda m: m.update(description="{}"), "the file was altered"),
        (lambda m: m.update(format="oxytorch.program", version="2"), "expected program in its"),
    ],
)
def test_other_files_are_refused(change: Any, message: str, path: Path) -> None:
    file = TensorFile(path)
    metadata = dict(file.metadata)
    change(metadata)
    write(path, {name: Source.of(file.tensor(name)) for name in file.places}, metadata)
    with pytest.raises(CheckpointError, match=message) as caught:
        oxytorch.load(path)
    assert str(path) in str(caught.value)


def test_a_program_is_asked_for(path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"of format 'oxytorch.language_model'"):
        programs.load(path)


def test_truncated_and_altered_files_are_refused(path: Path) -> None:
    """Each byte of the header, and each tensor's with verify=True, is looked at."""
    content = path.read_bytes()
    generator = random.Random(0)
    passed = 0
    for turn in range(300):
        made = bytearray(content)
        if turn % 2:
            made[generator.randrange(len(made))] ^= 1 << generator.randrange(8)
        else:
            del made[generator.randrange(len(made)) :]
        path.write_bytes(made)
        try:
            oxytorch.load(path, verify=True)
        except CheckpointError:
            continue
        assert turn % 2  # a space before the first tensor, or a key that nobody reads
        passed += 1
    assert passed < 6


def _layer(description: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = description["model"]["layers"][1]
    return found


def _set(*keys: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(description: dict[str, Any]) -> None:
        for key in keys[:-1]:
            description = description[key]
        description[keys[-1]] = value

    return change


_SECOND = ("model", "layers", 1)
_ATTENTION = (*_SECOND, "attention")

DESCRIPTIONS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "no model": (_set("model", value=3), "expected model in its description"),
    "a class": (_set("model", "is", value="Rotation"), "expected model to be a FusedModel of"),
    "another class": (_set(*_SECOND, "mlp", "is", value="Attention"), "mlp to be a .*Mlp"),
    "a field": (_set(*_SECOND, "new", value=1), "model.layers.1 to be a DecoderLayer of"),
    "no field": (lambda d: _layer(d).pop("parallel"), "model.layers.1 to be a DecoderLayer"),
    "no layers": (_set("model", "layers", value=[]), "at least one layer"),
    "a layer": (_set(*_SECOND, value=None), "model.layers.1 to be a DecoderLayer"),
    "a number": (_set(*_ATTENTION, "heads", value=4.0), "attention.heads to be a int"),
    "a truth": (_set(*_ATTENTION, "heads", value=True), "attention.heads to be a int"),
    "nan": (_set(*_ATTENTION, "scale", value=float("nan")), "attention.scale to be a float"),
    "infinity": (_set(*_ATTENTION, "scale", value=10**400), "attention.scale to be a float"),
    "heads": (_set(*_ATTENTION, "heads", value=3), "layer 1: expected heads that 2 key heads"),
    "no heads": (_set(*_ATTENTION, "kv_heads", value=0), "expected kv_heads above 0"),
    "head_dim": (_set(*_ATTENTION, "head_dim", value=16), "query, key and value of 128 outputs"),
    "layout": (_set(*_ATTENTION, "layout", value="rows"), "a known order of heads"),
    "rotary": (_set(*_ATTENTION, "rotary", value=16), "expected angles of 16 values, got 32"),
    "odd": (_set(*_ATTENTION, "rotary", value=7), "expected up to 32 rotated values"),
    "window": (_set(*_ATTENTION, "window", value=0), "expected a window above 0"),
    "softcap": (_set(*_ATTENTION, "softcap", value=-1), "a softcap above 0"),
    "order": (lambda d: _order(d), "each of 64 inputs once"),
    "table": (_set("model", "rotary", value=[0, 9]), "layer 1 to have one of 1 rotary tables"),
    "tables": (_set("model", "rotary", value=[0]), "expected 2 layers' rotary tables, got 1"),
    "activation": (_set(*_SECOND, "mlp", "activation_fn", value="os.system"), "known activation"),
    "norm": (_set(*_SECOND, "mlp_norm", "kind", value="group"), "a norm of a known kind"),
    "no norms": (lambda d: _layer(d).update(norm_last=True, mlp_norm=None), "norms behind both"),
    "gated": (_set(*_SECOND, "mlp", "up", "gated", value=False), "expected layer.*|.*gated or not"),
    "dtype": (_set("model", "dtype", value="int8"), "activations of float32 or bfloat16"),
    "no dtype": (_set("model", "dtype", value="float31"), "model.dtype to be a dtype"),
    "format": (_set(*_ATTENTION, "qkv", "weight", "format", value="int5"), "qkv.weight to fit"),
    "no parts": (_set(*_ATTENTION, "qkv", "weight", "tensors", value={}), "qkv.weight to fit"),
    "parts": (_set(*_ATTENTION, "qkv", "weight", "tensors", value={"a": 1}), "a packed weight"),
    "no tensor": (_set("model", "norm", "module", "weight", "tensor", value="gone"), "in the file"),
    "shape": (_set("model", "norm", "module", "weight", "shape", value=[1]), "to be bfloat16 of"),
    "positions": (_set("positions", value=0), "expected positions 1 to"),
    "no positions": (_set("positions", value="many"), "expected positions in its description"),
    "settings": (_set("generation", value={}), "expected settings eos_token_id"),
    "ends": (_set("generation", "eos_token_id", value=["a"]), "eos_token_id to be a list"),
    "a large end": (_set("generation", "eos_token_id", value=[1 << 70]), "expected a token"),
    "a penalty": (_set("generation", "repetition_penalty", value=-1), "repetition_penalty > 0"),
    "a large penalty": (_set("generation", "repetition_penalty", value=10**400), "penalty > 0"),
    "strings": (_set("generation", "stop_strings", value=[""]), "stop_strings to be a list"),
}


def _order(description: dict[str, Any]) -> None:
    """An entry that is a tensor of the file, but no order of inputs."""
    qkv = _layer(description)["attention"]["qkv"]
    qkv["order"] = description["model"]["tables"][0]["rotation"]["frequencies"]


@pytest.mark.parametrize(("change", "message"), DESCRIPTIONS.values(), ids=DESCRIPTIONS)
def test_a_description_that_does_not_fit_is_refused(
    change: Callable[[dict[str, Any]], None], message: str, tmp_path: Path
) -> None:
    path = _written("int4", tmp_path)
    forge(path, lambda description, tensors: change(description))
    with pytest.raises(CheckpointError, match=message) as caught:
        oxytorch.load(path)
    assert str(path) in str(caught.value)


HUGE = [*(1 << n for n in (16, 28, 31, 32, 40, 61, 63)), 10**400]
VALUES = [None, True, False, 0, -1, 1, 2, 3, 17, 1e-300, 1e300, -0.5, "", "none", "int8", [], {},
          [1, 2], {"is": "Norm"}, *HUGE]  # fmt: skip


def _leaves(data: Any, found: list[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    """All places in a description: what they are in, and by which key."""
    keys: Any = data if isinstance(data, dict) else range(len(data))
    for key in keys:
        found.append((data, key))
        if isinstance(data[key], (dict, list)):
            _leaves(data[key], found)
    return iter(found)


@pytest.mark.parametrize("seed", range(40))
def test_forged_descriptions_never_lead_astray(seed: int, path: Path, little_memory: None) -> None:
    """Whatever a forger writes is refused, or generates, or raises an error of its operators."""
    numbers = random.Random(seed)

    def change(description: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        places = [*_leaves({k: description[k] for k in ("model", "positions", "generation")}, [])]
        for _ in range(numbers.randint(1, 2)):
            owner, key = numbers.choice(places)
            owner[key] = numbers.choice(VALUES)

    for _ in range(8):
        forge(path, change)
        try:
            _run(path)
        except (CheckpointError, RuntimeError):
            continue


@pytest.mark.parametrize("seed", range(30))
def test_tensors_of_another_size_are_never_read(seed: int, path: Path, little_memory: None) -> None:
    numbers = random.Random(seed)
    name = numbers.choice(sorted(TensorFile(path).places))

    def change(description: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        own = tensors[name].flatten()
        if numbers.random() < 0.5:
            own = own[: numbers.randrange(own.numel())]
        else:
            own = own[:64].to(numbers.choice([torch.int64, torch.float16, torch.bool]))
        tensors[name] = own
        for owner, key in [*_leaves(description["model"], [])]:
            if isinstance(owner, dict) and owner.get("tensor") == name and key == "tensor":
                owner |= {"shape": [*own.shape], "order": [0]}
                owner["dtype"] = str(own.dtype).removeprefix("torch.")

    forge(path, change)
    with pytest.raises(CheckpointError):
        oxytorch.load(path)
