"""Exported programs become programs: the same answers, sizes and errors as torch's own module."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
import threading
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.nn import functional as F

import oxytorch
from oxytorch.ops.attention import is_fast
from oxytorch.ops.linear import supports
from oxytorch.program import ProgramModel
from oxytorch.program.passes import linear
from oxytorch.rewriting import measure
from tiny import Formula

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

BATCH, LENGTH = Dim("batch", max=64), Dim("length", max=32)


def _export(model: nn.Module, *args: Any, sizes: Any = None, **kwargs: Any) -> ExportedProgram:
    return torch.export.export(model, args, kwargs, dynamic_shapes=sizes)


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, list | tuple):
        return [leaf for part in value for leaf in _leaves(part)]
    return [value]


def _same(found: Any, wanted: Any, tolerance: float = 1e-5, strides: bool = True) -> None:
    ours, theirs = _leaves(found), _leaves(wanted)
    assert len(ours) == len(theirs)
    for own, right in zip(ours, theirs, strict=True):
        if isinstance(right, Tensor):
            assert (own.dtype, own.shape) == (right.dtype, right.shape)
            assert own.stride() == right.stride() or not strides
            torch.testing.assert_close(own, right, rtol=tolerance, atol=tolerance)
        else:
            assert type(own) is type(right) and own == right


def _ids(batch: int, length: int) -> dict[str, Tensor]:
    ids = torch.arange(batch * length).reshape(batch, length) % 50
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _pixels(batch: int, size: int = 32) -> dict[str, Tensor]:
    return {
        "pixel_values": torch.linspace(-1, 1, batch * 3 * size**2).reshape(batch, 3, size, size)
    }


def _text(name: str, **options: Any) -> tuple[str, dict[str, Any], Any, tuple[Any, ...]]:
    settings = {
        "vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 64, "max_position_embeddings": 64, "pad_token_id": 0,
    }  # fmt: skip
    sizes = {key: {0: BATCH, 1: LENGTH} for key in _ids(2, 5)}
    calls = (_ids(2, 5), _ids(3, 7), _ids(1, 31))
    return name, {**settings, **options}, sizes, calls


def _image(name: str, size: int = 32, **options: Any) -> tuple[str, dict[str, Any], Any, Any]:
    calls = (_pixels(2, size), _pixels(5, size), _pixels(1, size))
    return name, options, {"pixel_values": {0: BATCH}}, calls


MODELS = [
    _text("BertModel"),
    _text("LlamaModel", num_key_value_heads=2, use_cache=False, bos_token_id=1, eos_token_id=2),
    _image("ViTModel", hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
           intermediate_size=64, image_size=32, patch_size=8),
    _image("ResNetForImageClassification", embedding_size=8, hidden_sizes=[8, 16, 16, 32],
           depths=[1, 1, 1, 1]),
    _image("SegformerForSemanticSegmentation", 64, hidden_sizes=[8, 8, 16, 16],
           depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 2], decoder_hidden_size=16),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "sizes", "calls"), MODELS, ids=[m[0] for m in MODELS])
def test_models_of_transformers(name: str, options: Any, sizes: Any, calls: Any) -> None:
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    model = kind(kind.config_class(**options)).eval()
    exported = _export(model, sizes=sizes, **calls[0])
    program, module = oxytorch.optimize(exported), exported.module()
    with torch.no_grad():
        for call in calls:
            found, wanted = program(**call), module(**call)
            assert type(found) is type(wanted) and [*found] == [*wanted]
            _same(found, wanted, strides=name != "SegformerForSemanticSegmentation")


Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass
class Result:
    total: Tensor
    parts: list[Tensor]
    nothing: Tensor | None = None


torch.export.register_dataclass(Result)


class Nested(nn.Module):
    def forward(self, x: Any, cache: Any, factor: int = 3, *, flag: bool = True) -> Any:
        x, (y, z) = x["a"], cache
        total = (x + y[0]) * factor
        return {"sum": total, "rest": (z, [None, 2.5, factor, "text"])}, Pair(y[0] * 2, z), flag


NESTED = ({"a": torch.ones(2, 3)}, ([torch.ones(2, 3)], torch.zeros(4)))


def test_nested_arguments_and_results() -> None:
    exported = _export(Nested(), *NESTED, 4, flag=False)
    program, module = oxytorch.optimize(exported), exported.module()
    found, wanted = program(*NESTED, 4, flag=False), module(*NESTED, 4, flag=False)
    _same(found, wanted)
    assert type(found[1]) is Pair and found[0]["rest"][1][1:] == [2.5, 4, "text"]
    assert found[1].second is NESTED[1][1]  # what is returned as it came is itself


def test_dataclasses_are_results() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Result:
            return Result(x.sum(), [x * 2, x])

    exported = _export(Model(), torch.ones(3))
    found = oxytorch.optimize(exported)(torch.ones(3))
    assert isinstance(found, Result) and found.nothing is None
    _same([found.total, found.parts], [torch.tensor(3.0), [torch.ones(3) * 2, torch.ones(3)]])


class Mixed(nn.Module):
    """Tied weights, constants, a buffer, a convolution with channels last, sizes in formulas."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 8)
        self.head = nn.Linear(8, 9, bias=False)
        self.head.weight = self.embedding.weight
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.register_buffer("scale", torch.tensor([2.0]), persistent=False)
        self.shift = torch.arange(9.0)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        x = x.reshape(ids.shape[0] // 2, 2, -1).sum(1).reshape(ids.shape[0] // 2, -1, 8)
        x = F.softplus(self.conv(x.transpose(1, 2))).transpose(1, 2)
        return self.head(x * self.scale + torch.arange(x.shape[1])[:, None]) + self.shift


def _mixed(batch: Any = 2 * Dim("half", max=10)) -> ExportedProgram:  # noqa: B008
    torch.manual_seed(0)
    sizes = {"ids": {0: batch, 1: Dim("length", max=32)}}
    return _export(Mixed().eval(), torch.ones(4, 5, dtype=torch.long), sizes=sizes)


def _loaded(exported: ExportedProgram) -> ExportedProgram:
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    return torch.export.load(file)


@pytest.mark.parametrize("loaded", [False, True])
def test_sizes_are_served_and_refused_as_by_torch(loaded: bool) -> None:
    exported = _loaded(_mixed(Dim.DYNAMIC)) if loaded else _mixed()
    program, module = oxytorch.optimize(exported), exported.module()
    served = 0
    for batch in (2, 3, 4, 7, 20, 22):
        for length in (1, 2, 9, 32, 33):
            ids = torch.ones(batch, length, dtype=torch.long)
            try:
                wanted = module(ids)
            except (AssertionError, RuntimeError):
                with pytest.raises(ValueError, match=r"program: expected sizes with .*ids of"):
                    program(ids)
            else:
                served += 1
                _same(program(ids), wanted)
    assert served > 5


@pytest.mark.parametrize("strict", [False, True])
def test_arguments_without_names_share_a_size(strict: bool) -> None:
    class Sum(nn.Module):
        def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
            return x.sum() + rest[0] + rest[1]

    given, batch = (torch.ones(2), torch.ones(4, 3), torch.ones(4, 3)), Dim("batch")
    sizes = (None, ({0: batch}, {0: batch}))
    exported = torch.export.export(Sum(), given, dynamic_shapes=sizes, strict=strict)
    program = oxytorch.optimize(exported)
    for count in (2, 5):
        rest = torch.randn(count, 3), torch.randn(count, 3)
        _same(program(torch.ones(2), *rest), Sum()(torch.ones(2), *rest))
    with pytest.raises(ValueError, match=r"expected sizes with rest_1.shape\[0\] =="):
        program(torch.ones(2), torch.ones(4, 3), torch.ones(3, 3))


@pytest.mark.parametrize("strict", [False, True])
def test_guards_that_nobody_declared(strict: bool) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, parts: dict[str, Any], n: int) -> Any:
            total = parts["k"][0] + parts["k"][1]
            if total.shape[0] % 3 == 0:
                total = total + 1
            return x.reshape(x.shape[0] // 4, 4, -1).sum(-1), total, x.expand(n, *x.shape)

    free = Dim.DYNAMIC
    sizes = {"x": {0: free}, "parts": {"k": [{0: free}, {0: free}]}, "n": free}
    parts = {"k": [torch.ones(6, 9), torch.ones(6, 9)]}
    exported = torch.export.export(
        Model(), (torch.ones(8, 6), parts, 3), dynamic_shapes=sizes, strict=strict
    )
    program, module = oxytorch.optimize(exported), exported.module()
    good = (torch.ones(16, 6), {"k": [torch.ones(9, 9), torch.ones(9, 9)]}, 5)
    _same(program(*good), module(*good))
    with pytest.raises(ValueError, match=r"% 3\) == 0, .* parts\['k'\]\[0\] of \[7, 9\]"):
        program(good[0], {"k": [torch.ones(7, 9), torch.ones(7, 9)]}, 5)
    with pytest.raises(ValueError, match=r"parts\['k'\]\[1\]\.shape\[0\] =="):
        program(good[0], {"k": [torch.ones(9, 9), torch.ones(6, 9)]}, 5)
    with pytest.raises(ValueError, match=r"x\.shape\[0\]"):
        program(torch.ones(7, 6), *good[1:])


BAD: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "too few": (lambda m: m(NESTED[0]), TypeError, "3 positional arguments and .*, got 1;"),
    "no keyword": (lambda m: m(*NESTED, 4), TypeError, r"keyword arguments \['flag'\], got \[\]"),
    "keys": (lambda m: m({"b": 1}, NESTED[1], 4, flag=False), TypeError, r"x to be a dict with"),
    "a tuple": (lambda m: m(NESTED[0], [1], 4, flag=False), TypeError, "cache to be a tuple of 2"),
    "no tensor": (
        lambda m: m({"a": 3}, NESTED[1], 4, flag=False), TypeError, r"x\['a'\] to be a tensor",
    ),
    "dtype": (
        lambda m: m({"a": torch.ones(2, 3).half()}, NESTED[1], 4, flag=False),
        TypeError,
        r"x\['a'\] to be a torch.float32 cpu strided tensor, got a torch.float16",
    ),
    "shape": (
        lambda m: m({"a": torch.ones(2, 4)}, NESTED[1], 4, flag=False),
        ValueError,
        r"x\['a'\] of shape \[2, 3\], got \[2, 4\]; export or save the model with dynamic_shapes",
    ),
    "number": (lambda m: m(*NESTED, 5, flag=False), ValueError, "factor to be 4, .* got 5"),
    "bool": (lambda m: m(*NESTED, 4, flag=0), ValueError, "flag to be False, .* got 0"),
    "gradient": (
        lambda m: m({"a": torch.ones(2, 3, requires_grad=True)}, NESTED[1], 4, flag=False),
        ValueError,
        "without requires_grad",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "message"), BAD.values(), ids=BAD)
def test_other_arguments_are_refused(
    call: Callable[[Any], Any], kind: type[Exception], message: str
) -> None:
    program = oxytorch.optimize(_export(Nested(), *NESTED, 4, flag=False))
    with pytest.raises(kind, match=message):
        call(program)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.count.add_(1.0)
        x.mul_(2)
        return x + self.count, x


def test_buffers_and_inputs_are_written() -> None:
    program, stock = oxytorch.optimize(_export(Counts(), torch.ones(2, 3))), Counts()
    ours, theirs = torch.ones(2, 3), torch.ones(2, 3)
    for _ in range(3):
        found, wanted = program(ours), stock(theirs)
        _same(found, wanted)
        _same(ours, theirs)
        assert found[1] is ours
    _same(program.state, [stock.count])


def test_a_copy_has_its_own_state() -> None:
    program = oxytorch.optimize(_export(Counts(), torch.ones(2, 3)))
    for copied in (copy.deepcopy(program), pickle.loads(pickle.dumps(program))):
        copied(torch.ones(2, 3))
        assert copied.state[0].tolist() == [1, 1, 1] and program.state[0].tolist() == [0, 0, 0]


def test_weights_are_those_of_the_module_and_no_copies() -> None:
    exported = _mixed()
    program = oxytorch.optimize(exported)
    places = {tensor.data_ptr() for tensor in exported.state_dict.values()}
    own = [tensor.data_ptr() for tensor in program.program.constants]
    assert places <= {*own} and len({*own}) == len(own)  # tied weights once


def test_autocast_around_changes_nothing() -> None:
    program = oxytorch.optimize(_mixed())
    ids = torch.ones(4, 5, dtype=torch.long)
    wanted = program(ids)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _same(program(ids), wanted)
    with torch.inference_mode():
        _same(program(ids), wanted)


def test_random_numbers_are_those_of_torch() -> None:
    class Noise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x, 0.5) + torch.rand(x.shape[0], 3)

    exported = _export(Noise(), torch.ones(4, 3), sizes={"x": {0: BATCH}})
    program, module = oxytorch.optimize(exported), exported.module()
    torch.manual_seed(3)
    wanted = [module(torch.ones(5, 3)) for _ in range(2)]
    torch.manual_seed(3)
    _same([program(torch.ones(5, 3)) for _ in range(2)], wanted)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: torch.histc(x, 4), "histc"),
        (lambda x: x * x.long().sum().item(), "item|_local_scalar_dense"),
        (lambda x: torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,)), "cond|true_gr"),
    ],
    ids=["histc", "item", "cond"],
)
def test_what_a_program_cannot_hold_is_named(
    function: Callable[[Tensor], Any], message: str
) -> None:
    exported = _export(Formula(function), torch.ones(3, 3))
    with pytest.raises(ValueError, match=rf"cannot become a program: .*({message})"):
        oxytorch.optimize(exported)


def test_what_torch_can_write_in_smaller_operators_is_held() -> None:
    exported = _export(Formula(lambda x: torch.renorm(x, 2, 0, 1.0)), torch.ones(3, 3))
    _same(oxytorch.optimize(exported)(torch.ones(3, 3)), torch.ones(3, 3).renorm(2, 0, 1.0))


_IN_PARTS: dict[str, Callable[[Tensor], Any]] = {
    "one_hot": lambda x: F.one_hot(x.argmax(-1), 16),
    "addmm_of_a_matrix": lambda x: torch.addmm(x[:, :3], x, x.T),
    "addmm_with_factors": lambda x: torch.addmm(x[0, :3], x, x.T, beta=0.5, alpha=2),
    "addmm_without_sum": lambda x: torch.addmm(x[:, :3] / 0, x, x.T, beta=0),
    "addmv": lambda x: torch.addmv(x[:, 0], x, x[0], beta=0.5),
    "baddbmm": lambda x: torch.baddbmm(x[None, :, :3], x[None], x.T[None], alpha=0.25),
    "shift_left": lambda x: x.argmax(1) << 1,
    "shift_right": lambda x: torch.bitwise_right_shift(x.argmax(1), 1),
    "complex_factor": lambda x: (torch.complex(x, x) * 1j).real,
    "complex_sum": lambda x: (torch.complex(x, x) + (1 + 2j)).imag,
    "rrelu": lambda x: F.rrelu(x, 0.1, 0.4),
    "floor_divide": lambda x: x // 0.3,
    "var": lambda x: x.var(),
    "var_of_rows": lambda x: (x - x.mean(1, keepdim=True)) / (x.var(-1, False, True) + 1e-5).sqrt(),
    "var_of_columns": lambda x: x.var((0,), correction=2),
    "var_of_bfloat16": lambda x: (x.bfloat16() + 100).var(1),
    "std": lambda x: x.std(1, keepdim=True),
    "std_mean": lambda x: torch.std_mean(x, 1),
    "var_mean": lambda x: torch.var_mean(x.double(), (0, 1), correction=0, keepdim=True),
    "tril_indices": lambda x: x[tuple(torch.tril_indices(3, 3, -1))],
    "triu_indices": lambda x: x[tuple(torch.triu_indices(3, 9, 1))],
    "quantile": lambda x: x.quantile(0.3, dim=1),
    "nanquantile": lambda x: x.nanquantile(torch.tensor([0.1, 0.9])),
    "norm": torch.linalg.norm,
    "renorm": lambda x: torch.renorm(x, 2, 0, 1.0),
}


@pytest.mark.parametrize("name", [*_IN_PARTS])
def test_operators_are_taken_apart_independently_of_each_other(name: str, tmp_path: Path) -> None:
    """Each as it is, and beside one that is written in other parts; in a file too."""
    own = _IN_PARTS[name]
    both = Formula(lambda x: (own(x), torch.einsum("ab,cb->ac", x, x))).eval()
    x = torch.linspace(-2, 3, 48).reshape(3, 16)
    for model in (Formula(own).eval(), both):
        program = oxytorch.optimize(_export(model, x))
        _same(program(x), model(x))
        oxytorch.save(program, tmp_path / "program.oxy")
        _same(oxytorch.load(tmp_path / "program.oxy")(x), model(x))
        fast = oxytorch.optimize(model, sample_input=x, passes=["program"])
        assert "1 x one program for" in str(oxytorch.explain(fast))
        with torch.no_grad():
            _same(fast(x), model(x))


def test_of_several_operators_the_one_that_has_no_parts_is_named() -> None:
    model = Formula(lambda x: (torch.einsum("ab,cb->ac", x, x), torch.histc(x, 4)))
    with pytest.raises(ValueError, match=r"cannot become a program: aten\.histc"):
        oxytorch.optimize(_export(model, torch.ones(3, 3)))


def test_other_arguments_of_optimize_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"no other argument .* got dtype; convert the model before"
    ):
        oxytorch.optimize(_mixed(), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="no other argument with an exported program, got verify"):
        oxytorch.optimize(_mixed(), verify=True)


def test_a_keyword_for_an_argument_by_position_is_named() -> None:
    program = oxytorch.optimize(_export(nn.Linear(3, 2), torch.ones(3, 3)))
    with pytest.raises(TypeError, match=r"got 0 and the keyword arguments \['input'\]; pass arg"):
        program(input=torch.ones(3, 3))


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    program = oxytorch.optimize(_export(nn.Linear(3, 2), torch.ones(3, 3)))
    with pytest.raises(FileNotFoundError, match=r"found no .*absent; create it first") as found:
        oxytorch.save(program, tmp_path / "absent" / "program.oxy")
    assert "partial" not in str(found.value)


def test_many_threads_call_one_program() -> None:
    exported = _mixed()
    program, module = oxytorch.optimize(exported), exported.module()
    wrong: list[Any] = []

    def run(seed: int) -> None:
        for step in range(20):
            ids = torch.full((2 * (2 + step % 5), 3 + (seed + step) % 9), seed)
            try:
                with torch.no_grad():
                    _same(program(ids), module(ids))
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


class OfAllLayers(nn.Module):
    """Layers that `torch.export` leaves in operators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.scale = nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16)
        self.parts, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.norm, self.root = nn.LayerNorm(16), nn.RMSNorm(16, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.scale(self.image(x)).relu().flatten(2).transpose(1, 2)
        query, key, value = self.parts(rows).view(2, 36, 3, 4, 4).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(query, key, value)
        mixed = self.out(found.transpose(1, 2).reshape(rows.shape))
        return self.root(self.norm(rows + mixed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators_of_exported_graphs_are_joined_too(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "TIMED", False)
    monkeypatch.setattr(linear, "SMALLEST", 0)
    model, x = OfAllLayers().eval().to(dtype), torch.randn(2, 3, 8, 8, dtype=dtype)
    program = oxytorch.optimize(_export(model, x))
    with torch.no_grad():
        _same(program(x), model(x), 1e-5 if dtype == torch.float32 else 3e-2)
    text = str(program)
    wanted = ["relu_", "rms_norm", "oxytorch::layer_norm"] + ["oxytorch::attention"] * is_fast()
    if supports(dtype) is None:
        wanted += ["mkldnn::_convolution_pointwise", "mkldnn::_linear_pointwise"]
    assert all(part in text for part in wanted), text
    assert "batch_norm" not in text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("affine", [False, True])
def test_root_mean_squares_have_an_epsilon_that_nobody_gave(
    dtype: torch.dtype, affine: bool
) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(64, elementwise_affine=affine)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.norm(x + x * 2)
            return found

    model, x = Normed().to(dtype).eval(), torch.randn(3, 64).to(dtype) * 1e-4
    program = oxytorch.optimize(_export(model, x))
    small = {torch.bfloat16: 2e-2, torch.float16: 2e-3}.get(dtype, 1e-5)
    torch.testing.assert_close(program(x), model(x), rtol=small, atol=small)
    assert ("oxytorch::add_rms_norm" in str(program)) is (dtype != torch.float64)


@pytest.mark.parametrize(
    "numbers",
    [
        lambda n: torch.arange(0, n, 3),
        lambda n: torch.arange(2, n + 2),
        lambda n: torch.arange(-3, n, 2, dtype=torch.int32),
        lambda n: torch.arange(1 - n, n),
        lambda n: torch.arange(n, 3 * n, 4),
    ],
)
def test_integers_between_sizes_are_counted(numbers: Callable[[int], Tensor]) -> None:
    class Counts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return numbers(x.shape[0])

    program = oxytorch.optimize(_export(Counts(), torch.ones(5), sizes=({0: Dim.AUTO},)))
    for count in (4, 5, 9, 64):
        found, expected = program(torch.ones(count)), numbers(count)
        assert torch.equal(found, expected) and found.dtype == expected.dtype


def test_sizes_among_tensors_are_saved(tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.where(x > 0, x * x.shape[0], x.shape[0] - 2)

    exported = _export(Scaled().eval(), torch.randn(3, 4), sizes=({0: BATCH},))
    oxytorch.save(oxytorch.optimize(exported), tmp_path / "model.oxy")
    loaded = oxytorch.load(tmp_path / "model.oxy")
    for rows in (2, 3, 7):
        x = torch.randn(rows, 4)
        _same(loaded(x), Scaled()(x))


def test_weights_in_the_order_of_onednn_stay_in_memory(packing_pays: Callable[..., None]) -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 200)).eval()
    exported = _export(model, torch.ones(4, 256), sizes=({0: BATCH},))
    program = oxytorch.optimize(exported)
    copied, pickled = copy.deepcopy(program), pickle.loads(pickle.dumps(program))
    if supports(torch.float32) is None:
        assert "mkldnn::" in str(program) and copied.program is program.program
    assert "mkldnn::" not in str(pickled) and "oxytorch::linear_panels" in str(pickled)
    with torch.no_grad():
        for x in (torch.randn(1, 256), torch.randn(7, 256)):
            for each in (program, copied, pickled):
                _same(each(x), model(x))
    packing_pays(True, in_panels=True)
    program = oxytorch.optimize(exported)
    assert program.storable() is program and "oxytorch::linear_panels" in str(program)


def test_it_prints_its_steps() -> None:
    program = oxytorch.optimize(_mixed())
    assert isinstance(program, ProgramModel)
    assert str(program).startswith("inputs 1 0 ") and "aten::" in str(program)
    assert repr(program).startswith("ProgramModel(ids; ")
