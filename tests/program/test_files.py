"""Programs in files: what comes back, what is shared, and what is refused of a bad file."""

from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils import _pytree

import oxytorch
from forged_files import forge
from oxytorch.core.tensor_file import Source, TensorFile, write
from oxytorch.program import Fields, ProgramModel, conditions
from oxytorch.program.allowed import IN_PLACE
from oxytorch.program.check import check
from oxytorch.program.passes import convolution, own_convolutions
from oxytorch.quantization import CheckpointError
from scripts import of_two_processes
from threads import errors_in_threads
from tiny import Formula

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


_ROWS = torch.randn(3, 256)


class Model(nn.Module):
    """Tied weights, a convolution with channels last, a buffer that is written, open sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 8)
        self.head = nn.Linear(8, 9, bias=False)
        self.head.weight = self.embedding.weight
        self.conv = nn.Conv2d(2, 4, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, ids: Tensor, image: Tensor, *, factor: float = 2.0) -> dict[str, Any]:
        self.calls.add_(1)
        x = self.head(self.embedding(ids)) * factor
        heads = x.reshape(ids.shape[0], ids.shape[1] // 2, 2, 9).softmax(-1)
        return {"x": x, "rest": (heads, [self.conv(image), None]), "calls": self.calls}


def _call(batch: int = 2, length: int = 4) -> tuple[Any, dict[str, Any]]:
    ids = torch.arange(batch * length).reshape(batch, length) % 9
    return (ids, torch.ones(1, 2, 5, 5)), {"factor": 3.0}


@pytest.fixture(scope="module")
def model() -> ProgramModel:
    torch.manual_seed(0)
    args, kwargs = _call()
    sizes = {"ids": {0: Dim("batch", max=32), 1: Dim.DYNAMIC}, "image": None, "factor": None}
    exported = torch.export.export(Model().eval(), args, kwargs, dynamic_shapes=sizes)
    with pytest.MonkeyPatch.context() as patch:  # as `packing_pays` decides for each test
        patch.setattr(own_convolutions, "is_faster", lambda *_: False)
        patch.setattr(convolution, "winners", lambda *_: set())
        return oxytorch.optimize(exported)


@pytest.fixture
def path(model: ProgramModel, tmp_path: Path) -> Path:
    oxytorch.save(model, tmp_path / "model.oxy")
    return tmp_path / "model.oxy"


def _equal(found: Any, wanted: Any) -> bool:
    ours, theirs = _pytree.tree_flatten(found), _pytree.tree_flatten(wanted)
    pairs = zip(ours[0], theirs[0], strict=True)
    return ours[1] == theirs[1] and all(
        torch.equal(a, b) and a.stride() == b.stride() if isinstance(b, Tensor) else a == b
        for a, b in pairs
    )


@pytest.mark.parametrize("verify", [False, True])
def test_a_file_holds_the_program(model: ProgramModel, path: Path, verify: bool) -> None:
    loaded, again = oxytorch.load(path, verify=verify), oxytorch.load(path)
    assert str(loaded) == str(model) and loaded.interface.conditions == model.interface.conditions
    own = copy.deepcopy(model)
    for batch, length in ((2, 4), (1, 6), (9, 8)):
        args, kwargs = _call(batch, length)
        wanted = own(*args, **kwargs)
        assert _equal(loaded(*args, **kwargs), wanted)
    assert loaded.state[0].item() == 3 and again.state[0].item() == 0
    for call in (_call(33, 4), _call(2, 5)):
        with pytest.raises(ValueError, match=r"program: expected sizes with"):
            loaded(*call[0], **call[1])


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_file_holds_every_activation_behind_a_layer(
    name: str, tmp_path: Path, packing_pays: Callable[[bool], None]
) -> None:
    packing_pays(False)  # then the layer stays as it is, and the activation is computed in place
    operator = getattr(torch.ops.aten, name.removesuffix("_"))
    model = nn.Sequential(nn.Linear(256, 512), Formula(operator), nn.Linear(512, 8)).eval()
    dtype = torch.float64 if name == "mish_" else torch.float32  # in which it is torch's
    model, x = model.to(dtype), torch.randn(3, 256, dtype=dtype)
    program = oxytorch.optimize(torch.export.export(model, (x,)))
    assert f"aten::{name} " in str(program.program)
    oxytorch.save(program, tmp_path / "model.oxy")
    loaded = oxytorch.load(tmp_path / "model.oxy")
    expected = model(x)
    torch.testing.assert_close(loaded(x), expected, equal_nan=True, rtol=1e-4, atol=1e-4)


def test_a_loaded_program_is_saved_with_its_state(path: Path) -> None:
    loaded = oxytorch.load(path)
    args, kwargs = _call()
    loaded(*args, **kwargs)
    oxytorch.save(loaded, path)  # over the file that it maps
    again = oxytorch.load(path, verify=True)
    assert _equal(again(*args, **kwargs), loaded(*args, **kwargs))
    assert again.state[0].item() == 2


def test_tensors_are_stored_once_and_as_they_lie(model: ProgramModel, path: Path) -> None:
    places = TensorFile(path).places
    assert [name for name in places if "weight" in name] in (
        ["embedding.weight", "conv.weight"], ["conv.weight", "embedding.weight"],
    )  # fmt: skip
    loaded = oxytorch.load(path)
    for own, kept in zip(loaded.program.constants, model.program.constants, strict=True):
        assert own.stride() == kept.stride() and torch.equal(own, kept)
    assert any(t.dim() == 4 and not t.is_contiguous() for t in loaded.program.constants)


def test_named_results_come_back_as_fields(tmp_path: Path) -> None:
    class Named(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return torch.export.Dim  # replaced below

    transformers = pytest.importorskip("transformers")
    kind = transformers.modeling_outputs.BaseModelOutput
    Named.forward = lambda self, x: kind(last_hidden_state=x * 2)  # type: ignore[method-assign]
    exported = torch.export.export(Named(), (torch.ones(3),))
    program = oxytorch.optimize(exported)
    assert type(program(torch.ones(3))) is kind
    oxytorch.save(program, tmp_path / "named.oxy")
    found = oxytorch.load(tmp_path / "named.oxy")(torch.ones(3))
    assert isinstance(found, Fields) and [*found] == ["last_hidden_state"]
    assert found.last_hidden_state is found["last_hidden_state"] is found[0]
    assert found.to_tuple()[0].tolist() == [2, 2, 2]
    with pytest.raises(AttributeError, match=r"no field 'logits', but .*last_hidden_state"):
        _ = found.logits


def test_tensors_are_copied_if_they_are_not_to_be_shared(path: Path) -> None:
    loaded, copied = oxytorch.load(path), oxytorch.load(path, shared=False)
    args, kwargs = _call()
    assert _equal(copied(*args, **kwargs), loaded(*args, **kwargs))
    places = {tensor.untyped_storage().data_ptr() for tensor in loaded.program.constants}
    assert len(places) == 1  # the whole file
    own = copied.program.constants
    assert len({each.untyped_storage().data_ptr() for each in own} | places) == len(own) + 1


SHARED = """
import sys, torch, oxytorch
model = oxytorch.load(sys.argv[1])
assert model(torch.ones(2, 700)).shape == (2, 900)
print("has run", flush=True)
sys.stdin.readline()
strange = {"transformers", "sympy", "torch._dynamo", "torch._inductor"} & set(sys.modules)
assert not strange, strange
size, where, is_ours = {}, [], False
for line in open("/proc/self/smaps"):
    head = line.split()
    if not head[0].endswith(":"):
        is_ours = line.rstrip().endswith(sys.argv[1])
        if is_ours:
            where += [[int(end, 16) for end in head[0].split("-")]]
    elif is_ours and head[1].isdigit():
        size[head[0]] = size.get(head[0], 0) + int(head[1])
for tensor in model.program.constants:
    assert any(begin <= tensor.data_ptr() < end for begin, end in where), "a copy"
assert size["Anonymous:"] == 0, size  # pages that were written to and copied
print(size["Rss:"])
"""


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="it reads Linux's smaps")
def test_processes_share_the_weights(tmp_path: Path) -> None:
    """Weights are the file's pages, which the system keeps once, and none is written to."""
    path = tmp_path / "model.oxy"
    model = nn.Linear(700, 900)
    oxytorch.save(oxytorch.optimize(torch.export.export(model, (torch.ones(2, 700),))), path)
    command = [sys.executable, "-c", SHARED, str(path)]
    for resident in of_two_processes(command):
        assert resident * 1024 >= model.weight.nbytes * 0.9


def _rewritten(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    forge(path, lambda description, _: change(description))


def _weight(description: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any]
    (found,) = (each for each in description["constants"] if each["tensor"] == "conv.weight")
    return found


def _set(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda description: description.update({key: value})


DESCRIPTIONS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "no program": (_set("program", 3), "expected program"),
    "other counts": (
        lambda d: d.update(program=d["program"].replace("inputs 3 0", "inputs 4 0")), "line|of 3 t",
    ),
    "no structure": (_set("arguments", ["tuple", [], ["leaf"]]), "expected arguments with 3"),
    "nested": (lambda d: d.update(results=_deep()), "expected a structure"),
    "a class": (_set("results", ["os.system", [], []]), "expected a tuple, list, dict or fields"),
    "keys": (_set("results", ["dict", ["a"], []]), "expected 0 different keys"),
    "outputs": (_set("outputs", [["tensor", 99]]), "expected an entry of outputs"),
    "few outputs": (_set("outputs", [["tensor", 0]]), "expected a result of 1 leaves"),
    "writes": (_set("writes", [["input", 2, 0]]), "expected a tensor to be written, got factor"),
    "written where": (_set("writes", [["constant", 0, 0]]), "expected an entry of writes"),
    "dtype": (_set("inputs", [["tensor", "x", "float31", []]] * 3), "expected an entry of inputs"),
    "conditions": (_set("conditions", [["size", 9, 9]]), "expected the place of an input"),
    "an operator": (_set("conditions", [["exec", 1, 2]]), "expected an operator of sizes"),
    "no tensor": (lambda d: d["constants"][0].update(tensor="gone"), "'gone' in the file"),
    "shape": (lambda d: _weight(d).update(shape=[1] * 4), "to be float32 of"),
    "order": (lambda d: _weight(d).update(order=[0] * 4), "expected an entry of a tensor"),
    "constants": (_set("constants", []), "expected a program of 3 tensors"),
    "state": (_set("state", [3]), "expected an entry of a tensor"),
}  # fmt: skip


def _deep() -> Any:
    found: Any = "leaf"
    for _ in range(200):
        found = ["tuple", [], [found]]
    return found


@pytest.mark.parametrize(("change", "message"), DESCRIPTIONS.values(), ids=DESCRIPTIONS)
def test_a_description_that_does_not_fit_is_refused(
    path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    _rewritten(path, change)
    with pytest.raises(CheckpointError, match=message) as caught:
        oxytorch.load(path)
    assert str(path) in str(caught.value)


TEXTS = {
    "nothing": ("", "line 1: expected inputs and three numbers"),
    "counts": ("inputs 1 -1 0\noutputs", "line 1: expected inputs"),
    "no outputs": ("inputs 1 0 0\n%1 = aten::relu %0", "line 2: expected outputs"),
    "unknown": ("inputs 1 0 0\n%1 = aten::rolu %0\noutputs %1", "line 2.*expected an operator of"),
    "foreign": ("inputs 1 0 0\n%1 = prim::Print %0\noutputs %1", "expected an operator of this"),
    "of the interpreter": ('inputs 1 0 0\n%1 = aten::save %0 "a"\noutputs %1', "expected an oper"),
    "a path": (
        'inputs 0 0 0\n%0 = aten::from_file "a" none none none none none none\noutputs %0',
        "a file may not call aten::from_file: it takes text and no tensor",
    ),
    "writes": ("inputs 1 0 0\n%1 = aten::sin_ %0\noutputs %1", "it writes to a tensor"),
    "written": ("inputs 1 0 1\n%2 = aten::relu_ %1\noutputs %2", "of a tensor that a step has"),
    "written in a mode": (
        'inputs 1 0 1\n%2 = aten::gelu_ %1 "none"\noutputs %2', "of a tensor that a step has",
    ),
    "writes nowhere": ("inputs 1 0 0\n%1 = aten::relu_\noutputs %1", "of a tensor that a step"),
    "set": ("inputs 2 0 0\n%2 = aten::set_.source_Tensor %0 %1\noutputs %2", "it writes to a"),
    "resizes": ("inputs 1 0 0\n%1 = aten::resize %0 [ 9 ] none\noutputs %1", "not dense"),
    "sparse": ("inputs 1 0 0\n%1 = aten::to_sparse %0 none none none\noutputs %1", "not dense"),
    "internal": ("inputs 1 0 0\n%1 = aten::_fw_primal %0 1\noutputs %1", "internal to torch"),
    "a program": ("inputs 1 0 0\n%1 = oxytorch::run_program 5 [ %0 ] [ ]\noutputs %1", "not ret"),
    "an address": ("inputs 1 0 0\n$0 = oxytorch::sources [ %0 ] [ ]\noutputs %0", "not return"),
    "a number": ("inputs 1 0 0\n%1 = aten::add.Scalar %0 1 1\noutputs %1", "takes a Number"),
    "too few": ("inputs 1 0 0\n%1 = aten::linear %0 %0\noutputs %1", "argument bias: it ends too"),
    "too many": ("inputs 1 0 0\n%1 = aten::relu %0 %0\noutputs %1", "expected no more arguments"),
    "no tensor": ("inputs 1 1 0\n%1 = aten::relu $0\noutputs %1", "expected a tensor that exists"),
    "later": ("inputs 1 0 0\n%1 = aten::relu %2\noutputs %1", "expected a tensor that exists, got"),
    "an int": ("inputs 1 0 0\n%1 = aten::relu 7\noutputs %1", "tensor that exists, got 7"),
    "a float": ("inputs 1 0 0\n%1 = aten::softmax.int %0 1.0 none\noutputs %1", "expected a Int"),
    "int for float": ("inputs 1 0 0\n%1 = aten::dropout %0 1 false\noutputs %1", "expected a Fl"),
    "a bool": ("inputs 1 0 0\n%1 = aten::dropout %0 0.5 1\noutputs %1", "expected a Bool"),
    "optional": ("inputs 2 0 0\n%2 = aten::linear %0 %1 %0\noutputs %2", "expected none or some"),
    "no list": ("inputs 1 0 0\n%1 = aten::view %0 3\noutputs %1", "expected a list"),
    "no end": ("inputs 1 0 0\n%1 = aten::view %0 [ 3\noutputs %1", "it ends too early"),
    "a layout": (
        "inputs 1 0 0\n%1 = aten::sum %0 some =strided\noutputs %1", "expected a ScalarType, got",
    ),
    "a dtype": ("inputs 1 0 0\n%1 = aten::sum %0 some =float7\noutputs %1", "expected a Scala"),
    "a text": ('inputs 1 0 0\n%1 = aten::gelu %0 "a/b"\noutputs %1', "expected a String"),
    "a device": (
        "inputs 0 0 0\n%0 = aten::rand [ 1 ] none none some cuda none\noutputs %0",
        "expected a DeviceObj",
    ),
    "results": ("inputs 1 0 0\n%1 %2 = aten::relu %0\noutputs %1", "expected 1 results of"),
    "no results": ("inputs 1 0 0\n= aten::relu %0\noutputs %0", "expected 1 results of"),
    "a list": ("inputs 1 0 0\n%1 = aten::split.Tensor %0 1 0\noutputs %1", r"in \[ \]"),
    "a size": ("inputs 1 0 0\n$0 = aten::relu %0\noutputs %0", "expected a tensor as result"),
    "numbering": ("inputs 1 0 0\n%5 = aten::relu %0\noutputs %5", "expected %1 as the next"),
    "divided": ("inputs 0 2 0\n$2 = / $0 $1\noutputs $2", "expected to divide by a tensor's size"),
    "by -1": ("inputs 0 1 0\n$1 = % $0 -1\noutputs $1", "expected to divide by a tensor's size"),
    "large": ("inputs 0 1 0\n$1 = + $0 9223372036854775808\noutputs $1", "expected a size or an"),
    "no sign": ("inputs 0 2 0\n$2 = ? $0 $1\noutputs $2", "expected an operator"),
    "a factor": ("inputs 2 0 0\n%2 = add %0 %1 1\noutputs %2", "expected a Float"),
    "spaces": ("inputs 1 0 0\n%1 = aten::relu  %0\noutputs %1", "two spaces in a row"),
    "outputs": ("inputs 1 0 0\noutputs %3", "line 2: expected values that exist, got %3"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "message"), TEXTS.values(), ids=TEXTS)
def test_a_text_that_a_file_may_not_have_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(text)


def test_the_rule_refuses_what_has_effects() -> None:
    """No operator that passes has an effect beyond its results, or reads what is no argument."""
    from oxytorch.program import check as checking

    allowed = set()
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith(("aten::", "oxytorch::")):
            try:
                checking._operator(name)
            except ValueError:
                continue
            allowed.add(name.partition("::")[2])
    forbidden = {"from_file", "save", "set", "resize", "run_program", "load_program", "data",
                 "_sparse_coo_tensor_unsafe", "record_stream", "sources", "watch"}  # fmt: skip
    assert not forbidden & {name.partition(".")[0] for name in allowed}
    writing = {name.partition(".")[0] for name in allowed if name.partition(".")[0][-1] == "_"}
    assert {name for name in writing if not name.startswith("__")} == {*IN_PLACE}
    assert {"linear", "conv2d", "softmax.int", "embedding", "rms_norm"} <= allowed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(format="pt"), "a file that oxytorch.save wrote, got a safetensors"),
        (lambda m: m.pop("format"), "a file that oxytorch.save wrote"),
        (
            lambda m: m.update(version="4"),
            "version 3 or 2 or 1, got .4.; a newer oxytorch",
        ),
        (lambda m: m.update(description="{}"), "the file was altered"),
        (lambda m: m.pop("description"), "the file was altered"),
    ],
)
def test_other_files_are_refused(path: Path, change: Any, message: str) -> None:
    file = TensorFile(path)
    metadata = dict(file.metadata)
    change(metadata)
    write(path, {name: Source.of(file.tensor(name)) for name in file.places}, metadata)
    with pytest.raises(CheckpointError, match=message):
        oxytorch.load(path)


def test_no_file_and_no_safetensors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="expected a file, found none"):
        oxytorch.load(tmp_path / "gone.oxy")
    for content in (b"", b"hello", b"PK\x03\x04" + bytes(100), b"\x40" + bytes(7) + b"[" * 64):
        (tmp_path / "bad.oxy").write_bytes(content)
        with pytest.raises(CheckpointError):
            oxytorch.load(tmp_path / "bad.oxy")


ROUNDS = 1 if not os.environ.get("SLOW") else 8
"""Runs of the tests of bad files, of 12,500 files each with SLOW=1: 10^5 in all."""
CUT, FLIPPED, REWRITTEN = (300, 1500, 400) if ROUNDS == 1 else (2000, 8000, 2500)


def _rounds() -> list[Any]:
    return [pytest.param(number, id=f"round{number}") for number in range(ROUNDS)]


@pytest.mark.parametrize("seed", _rounds())
def test_truncated_and_altered_files_are_refused(path: Path, tmp_path: Path, seed: int) -> None:
    """Each byte of the header, and each tensor's with verify=True, is looked at. What loads is run
    too."""
    content, bad = path.read_bytes(), tmp_path / "bad.oxy"
    args, kwargs = _call()
    expected = oxytorch.load(path)(*args, **kwargs)
    generator = random.Random(seed)
    for _ in range(CUT):
        bad.write_bytes(content[: generator.randrange(len(content))])
        with pytest.raises(CheckpointError):
            oxytorch.load(bad)
    passed = 0
    for _ in range(FLIPPED):
        made = bytearray(content)
        for _ in range(generator.choice((1, 1, 1, 2, 8))):
            made[generator.randrange(len(made))] ^= 1 << generator.randrange(8)
        bad.write_bytes(made)
        try:
            loaded = oxytorch.load(bad, verify=True)
        except CheckpointError:
            continue
        # A space before the first tensor, or a key of the metadata that nobody reads.
        passed += 1
        assert _equal(loaded(*args, **kwargs), expected)
    assert passed < FLIPPED / 100


WORDS = ("%0", "$0", "%9999", "[", "]", "some", "none", "=", "-1", "0", "1.0", "true", "=float32",
         "cpu", '"none"', "aten::relu", "aten::linear", "aten::expand", "aten::view", "size", "add",
         "*", "/", "9223372036854775807", "aten::as_strided", "aten::index_select", "")  # fmt: skip


@pytest.mark.parametrize("seed", _rounds())
def test_texts_that_are_altered_by_who_knows_the_format(path: Path, seed: int) -> None:
    """Each is refused, or runs and returns or raises an error of its operators."""
    args, kwargs = _call()
    text = str(oxytorch.load(path))
    generator = random.Random(seed)
    refused = ran = 0
    for _ in range(REWRITTEN):
        words = text.replace("\n", " \n ").split(" ")
        for _ in range(generator.randint(1, 3)):
            place = generator.randrange(len(words))
            words[place] = generator.choice([generator.choice(words), generator.choice(WORDS)])
        _rewritten(path, _set("program", " ".join(words).replace(" \n ", "\n")))
        try:
            oxytorch.load(path)(*args, **kwargs)
            ran += 1
        except (CheckpointError, RuntimeError, ValueError, TypeError, IndexError):
            refused += 1
    assert refused > 100 and ran > 0


def test_a_module_is_exported_with_its_sample(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 32, 3, 2), nn.ReLU(), nn.Conv2d(32, 32, 3, groups=32)).eval()
    x, path = torch.randn(2, 3, 20, 20), tmp_path / "model.oxy"
    for sample in (x, (x,), {"input": x}):
        oxytorch.save(model, path, sample_input=sample)
        loaded = oxytorch.load(path)
        found = loaded(**sample) if isinstance(sample, dict) else loaded(x)
        torch.testing.assert_close(found, model(x), rtol=1e-5, atol=1e-5)
    with pytest.raises(TypeError, match="save: expected no sample_input with a program"):
        oxytorch.save(loaded, path, sample_input=x)
    with pytest.raises(ValueError, match=r"save: expected model in evaluation mode"):
        oxytorch.save(model.train(), path, sample_input=x)


def test_a_module_is_saved_for_other_sizes(tmp_path: Path) -> None:
    model, path = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8)).eval(), "m.oxy"
    x, sizes = torch.randn(2, 256), {0: Dim.DYNAMIC}
    forms = (model, oxytorch.optimize(model), oxytorch.optimize(model, sample_input=x, graph=True))
    for form in forms:
        oxytorch.save(form, tmp_path / path, sample_input=x, dynamic_shapes=(sizes,))
        by_place = oxytorch.load(tmp_path / path)
        named = {"input": sizes}
        oxytorch.save(form, tmp_path / path, sample_input={"input": x}, dynamic_shapes=named)
        by_name = oxytorch.load(tmp_path / path)
        for rows in (1, 5):
            other = torch.randn(rows, 256)
            for found in (by_place(other), by_name(input=other)):
                torch.testing.assert_close(found, model(other), rtol=1e-5, atol=1e-5)
        with pytest.raises(ValueError, match=r"of shape \[any, 256\], got"):
            by_place(torch.randn(2, 255))
    with pytest.raises(TypeError, match="save: expected no dynamic_shapes without sample_input"):
        oxytorch.save(by_place, tmp_path / path, dynamic_shapes=(sizes,))


@pytest.mark.parametrize("way", ["stock", "packed", "program"])
@pytest.mark.parametrize("looks", ["save", "explain"])
def test_other_threads_call_a_model_while_it_is_exported(
    way: str, looks: str, tmp_path: Path
) -> None:
    stock, x = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.LayerNorm(256)).eval(), _ROWS
    options = {"packed": {}, "program": {"sample_input": x, "graph": True}}
    model = stock if way == "stock" else oxytorch.optimize(stock, **options[way])
    weights = [*model.parameters()]
    with torch.no_grad():
        expected = stock(x)
    is_over = threading.Event()

    def run(caller: int) -> None:
        with torch.no_grad():
            if caller:
                while not is_over.is_set():
                    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)
                return
            try:
                for _ in range(5):
                    if looks == "save":
                        oxytorch.save(model, tmp_path / "m.oxy", sample_input=x)
                    else:
                        oxytorch.graph.explain(model, x)
            finally:
                is_over.set()

    assert not errors_in_threads(run, range(3))
    assert all(a is b for a, b in zip(model.parameters(), weights, strict=True))
    if looks == "save":
        found = oxytorch.load(tmp_path / "m.oxy")(x)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_model_without_a_deep_copy_is_saved(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(256, 8)).eval()
    model.lock = threading.Lock()  # type: ignore[assignment]
    oxytorch.save(model, tmp_path / "m.oxy", sample_input=_ROWS)
    torch.testing.assert_close(oxytorch.load(tmp_path / "m.oxy")(_ROWS), model(_ROWS))


def test_only_programs_are_saved(tmp_path: Path) -> None:
    wanted = r"save: expected a program, or a module with sample_input, got a Linear"
    with pytest.raises(TypeError, match=wanted):
        oxytorch.save(nn.Linear(2, 2), tmp_path / "x.oxy")  # type: ignore[arg-type]


class Holder:
    """A class that torch knows, but no file does."""

    def __init__(self, value: Any) -> None:
        self.value = value


_pytree.register_pytree_node(
    Holder,
    lambda holder: ([holder.value], "context"),
    lambda values, context: Holder(*values),
    flatten_with_keys_fn=lambda holder: ([(_pytree.GetAttrKey("value"), holder.value)], "context"),
    serialized_type_name="tests.Holder",
)


def test_a_class_is_passed_in_memory_and_refused_in_a_file(tmp_path: Path) -> None:
    class Wraps(nn.Module):
        def forward(self, holder: Holder) -> Holder:
            return Holder(holder.value * 2)

    program = oxytorch.optimize(torch.export.export(Wraps(), (Holder(torch.ones(2)),)))
    assert program(Holder(torch.ones(2))).value.tolist() == [2, 2]
    with pytest.raises(TypeError, match="expected holder to be a Holder, got a Tensor"):
        program(torch.ones(2))
    with pytest.raises(ValueError, match="save: a Holder cannot be written to a file"):
        oxytorch.save(program, tmp_path / "x.oxy")


def test_named_tuples_of_torch_are_tuples_in_a_file(tmp_path: Path) -> None:
    class Largest(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return torch.max(x, 0)

    program = oxytorch.optimize(torch.export.export(Largest(), (torch.ones(2, 3),)))
    assert type(program(torch.ones(2, 3))) is torch.return_types.max
    oxytorch.save(program, tmp_path / "x.oxy")
    found = oxytorch.load(tmp_path / "x.oxy")(torch.ones(2, 3))
    assert type(found) is tuple and found[1].tolist() == [0, 0, 0]


def test_tensors_that_no_file_holds_are_refused(tmp_path: Path) -> None:
    class Strange(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("values", torch.ones(2, dtype=torch.complex128))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.values

    program = oxytorch.optimize(torch.export.export(Strange(), (torch.ones(2),)))
    with pytest.raises(ValueError, match=r"save: a file holds no torch.complex128, got .*values"):
        oxytorch.save(program, tmp_path / "x.oxy")


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("a % 4 == 0 and b > a", True),
        ("not a == 8 or b // a == 2", True),
        ("max(a, b, 3) - min(a, b) == -a + 2*b - 1", False),
        ("a**2 <= 63", False),
        ("1 < a < b", True),
        ("b // (a - 8) == 1", False),
    ],
)
def test_conditions_mean_what_python_says(text: str, holds: bool) -> None:
    condition = conditions.parse(text, {"a": ["size", 0, 1], "b": ["value", 1]})
    conditions.check(json.loads(json.dumps(condition)), [2, None])
    assert conditions.holds(condition, [(3, 8), 17]) is holds
    shown = conditions.text(condition, ["x", "n"])
    try:
        assert bool(eval(shown, {"x": torch.empty(3, 8), "n": 17, "max": max, "min": min})) is holds
    except ZeroDivisionError:
        assert not holds


@pytest.mark.parametrize("text", ["a.b == 1", "f(a)", "a / 2 == 1", "[1, a]", "a if a else b"])
def test_conditions_are_arithmetic_only(text: str) -> None:
    with pytest.raises(ValueError, match="expected arithmetic on sizes of inputs"):
        conditions.parse(text, {"a": ["size", 0, 1], "b": 3})


def _convert(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "oxytorch", "convert", *words]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ}, check=False)


def test_the_command_converts_and_compares(tmp_path: Path) -> None:
    args, kwargs = _call()
    exported = torch.export.export(Model().eval(), args, kwargs)
    torch.export.save(exported, tmp_path / "model.pt2")
    done = _convert(str(tmp_path / "model.pt2"))
    assert done.returncode == 0, done.stderr
    assert "model.oxy: 0.0 MB, ProgramModel(ids, image, factor; " in done.stdout
    assert "compared on the example" in done.stdout
    found = oxytorch.load(tmp_path / "model.oxy")(*args, **kwargs)
    assert torch.allclose(found["x"], exported.module()(*args, **kwargs)["x"])


@pytest.mark.parametrize("words", [["--text"], []])
def test_a_reader_that_has_gone_ends_the_command_quietly(
    words, tmp_path: Path, gone_reader
) -> None:
    args, kwargs = _call()
    exported = torch.export.export(Model().eval(), args, kwargs)
    torch.export.save(exported, tmp_path / "model.pt2")
    assert gone_reader(["convert", str(tmp_path / "model.pt2"), *words]) == 141


def test_mistakes_in_the_command_are_told(tmp_path: Path) -> None:
    (tmp_path / "no.pt2").write_text("hello")
    for words, message in (
        ((str(tmp_path / "gone.pt2"),), "found no"),
        ((str(tmp_path / "no.pt2"),), "expected a file that torch.export.save wrote"),
        ((str(tmp_path / "no.pt2"), "--import", "no_such_module"), "--import no_such_module: No"),
    ):
        done = _convert(*words)
        assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


def test_sample_of_texts_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(4, 4).eval()
    with pytest.raises(TypeError, match=r"got a list; of a model that takes texts"):
        oxytorch.save(model, tmp_path / "m.oxy", sample_input=["a text"])
