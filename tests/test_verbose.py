"""`oxytorch.verbose` notes every call of our operators and of oneDNN's, and costs nothing else."""

from __future__ import annotations

import ctypes
import io
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import oxytorch
from marks import NEEDS_LIBRARY
from oxytorch import isa, ops
from oxytorch.program.backend import compile_graph
from oxytorch.program.program import Program
from oxytorch.verbose import Log, Row, _row
from tiny import tiny_llama

pytestmark = NEEDS_LIBRARY
HAS_ONEDNN = torch.backends.mkldnn.is_available()


def _noted(run: Any) -> tuple[list[Row], str]:
    file = io.StringIO()
    with torch.no_grad(), oxytorch.verbose(file) as log:
        run()
    return log.rows, file.getvalue()


def test_call_is_noted_with_kernel_level_shapes_and_time() -> None:
    x, weight = torch.randn(3, 64), torch.randn(64)
    (row,), printed = _noted(lambda: ops.rms_norm(x, weight, 0.5))
    assert (row.source, row.op, row.kernel, row.level) == (
        "oxytorch",
        "rms_norm",
        "rms_norm",
        isa.active(),
    )
    assert row.shapes == "float32:3x64 float32:64 0.5"
    assert 0 < row.microseconds < 1e6
    assert "oxytorch::rms_norm" in printed
    assert printed.splitlines()[-1].split()[:2] == ["all", "1"]


@pytest.mark.parametrize("level", [level.name for level in isa.levels() if level.supported])
def test_level_is_the_active_one(level: str) -> None:
    with isa.use(level):
        rows, _ = _noted(lambda: ops.softmax(torch.randn(4, 33)))
    assert [row.level for row in rows] == [level]


def test_all_kernels_of_a_call_are_named() -> None:
    from oxytorch.ops.linear_panels import linear
    from oxytorch.ops.panels import PanelWeight

    weight = PanelWeight.from_dense(torch.randn(64, 128))
    rows, _ = _noted(lambda: linear(torch.randn(40, 128), weight))
    assert rows[-1].op == "linear_panels"
    assert rows[-1].kernel == "prepare_rows gemm"


def test_lists_and_texts_are_shown() -> None:
    tensors = [torch.randn(2, 8), torch.randn(2, 8).bfloat16()]
    rows, _ = _noted(lambda: ops.interaction(tensors[0], [tensors[0], tensors[0]]))
    assert rows[0].shapes == "float32:2x8 [float32:2x8 float32:2x8]"
    rows, _ = _noted(lambda: ops.gelu_mul(tensors[1], tensors[1], "tanh"))
    assert rows[0].shapes == "bfloat16:2x8 bfloat16:2x8 tanh"


def test_reference_is_named() -> None:
    rows, _ = _noted(lambda: ops.rms_norm(torch.randn(2, 8, dtype=torch.float64)))
    assert [(row.op, row.kernel) for row in rows] == [("rms_norm", "reference")]


def test_failed_call_is_noted_and_the_block_ends() -> None:
    file = io.StringIO()
    with torch.no_grad(), pytest.raises(RuntimeError, match="weight"), oxytorch.verbose(file):
        ops.rms_norm(torch.randn(2, 8), torch.randn(7))
    assert "oxytorch::rms_norm" in file.getvalue()
    assert _noted(lambda: None)[0] == []


def test_steps_of_a_program_are_noted() -> None:
    text = "inputs 1 0 0\n%1 = oxytorch::rms_norm %0 none 1e-06\n%2 = oxytorch::softmax %1 1.0 none"
    program = Program(f"{text}\noutputs %2", [])
    rows, _ = _noted(lambda: program([torch.randn(3, 8)]))
    assert [row.op for row in rows] == ["rms_norm", "softmax"]


@pytest.mark.skipif(not HAS_ONEDNN, reason="this torch has no oneDNN")
def test_lines_of_onednn_are_in_the_same_table_in_order() -> None:
    x, weight = torch.randn(64, 64).bfloat16(), torch.randn(64, 64).bfloat16()
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN has no bfloat16 products here")

    def run() -> None:
        ops.softmax(x)
        F.linear(x, weight)
        ops.rms_norm(x)

    rows, printed = _noted(run)
    names = [f"{row.source}::{row.op}" for row in rows if row.op != "reorder"]
    assert names == ["oxytorch::softmax", "onednn::matmul", "oxytorch::rms_norm"]
    row = next(row for row in rows if row.op == "matmul")
    assert row.shapes == "64x64:64x64 bf16"
    assert row.microseconds > 0
    assert "onednn::matmul" in printed.splitlines()[-2] + printed.splitlines()[-3] + printed


LINE = (
    "onednn_verbose,v1,primitive,exec,cpu,matmul,brg_matmul:avx10_1_512_amx,undef,src:bf16::blocked"
    ":ab::f0 wei:bf16::blocked:ba::f0 dst:f32::blocked:ab::f0,attr-scratchpad:user,,64x64:64x32,9.5"
)


def test_line_of_onednn_is_parsed() -> None:
    assert _row(LINE) == Row(
        "onednn", "matmul", "brg_matmul", "avx10_1_512_amx", "64x64:64x32 bf16/f32", 9500.0
    )
    assert _row("onednn_verbose,v1,info,cpu,runtime:OpenMP,nthr:2") is None
    assert _row("onednn_verbose,v1,primitive,create:cache_hit,cpu,matmul,a:b,,,,,1x1,0.1") is None


def test_summary_has_calls_time_and_share() -> None:
    log = Log([Row("oxytorch", name, "k", "avx2", "1", us) for name, us in
               (("a", 10.0), ("b", 60.0), ("a", 30.0))])  # fmt: skip
    lines = [line.split() for line in str(log).splitlines()[-4:]]
    assert lines == [
        ["op", "calls", "total", "us", "share"],
        ["oxytorch::b", "1", "60.0", "60.0", "%"],
        ["oxytorch::a", "2", "40.0", "40.0", "%"],
        ["all", "3", "100.0"],
    ]


def test_what_c_prints_passes_through(capfd: pytest.CaptureFixture[str]) -> None:
    libc = ctypes.CDLL(None)
    _noted(lambda: (libc.printf(b"a prompt: "), libc.printf(b"and\nonednn is no line\n")))
    libc.printf(b"after\n")
    libc.fflush(None)
    assert capfd.readouterr().out == "a prompt: and\nonednn is no line\nafter\n"


def test_calls_of_other_threads_are_noted() -> None:
    def run() -> None:
        threads = [
            threading.Thread(target=lambda: [ops.softmax(torch.randn(2, 8)) for _ in range(20)])
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert len(_noted(run)[0]) == 80


def test_nothing_is_noted_outside_and_blocks_are_not_nested() -> None:
    ops.softmax(torch.randn(2, 8))
    assert _noted(lambda: None)[0] == []
    with oxytorch.verbose(io.StringIO()):
        inner = oxytorch.verbose()
        with pytest.raises(RuntimeError, match="nested"):
            inner.__enter__()
    assert [row.op for row in _noted(lambda: ops.softmax(torch.randn(2, 8)))[0]] == ["softmax"]


class _Nested(nn.Module):
    """A model whose own code calls an op between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(64), nn.Softmax(-1))
        self.again = self.inner[1]

    def forward(self, x: Tensor, fails: bool = False) -> Tensor:
        x = ops.rms_norm(self.inner(x))
        if fails:
            raise ValueError("no such input")
        return ops.softmax(self.again(x))


def _places(model: nn.Module, run: Callable[[], Any]) -> list[tuple[str | None, str]]:
    with torch.no_grad(), oxytorch.verbose(io.StringIO(), model) as log:
        run()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    return [(row.module, row.op) for row in log.rows]


def test_rows_name_the_innermost_module() -> None:
    model, x = _Nested().eval(), torch.randn(4, 64)
    model.inner[0].forward = ops.layer_norm
    model.inner[1].forward = ops.softmax
    found = _places(model, lambda: (ops.rms_norm(x), model(x), ops.softmax(x)))
    assert found == [
        (None, "rms_norm"),
        ("inner.0", "layer_norm"),
        ("inner.1", "softmax"),
        ("", "rms_norm"),
        ("inner.1", "softmax"),
        ("", "softmax"),
        (None, "softmax"),
    ]


def test_table_has_a_column_of_modules_where_a_model_is_given() -> None:
    model, x, file = _Nested().eval(), torch.randn(4, 64), io.StringIO()
    with torch.no_grad(), oxytorch.verbose(file, model=model):
        model(x)
        ops.softmax(x)
    head, *rows = file.getvalue().split("\n\n")[0].splitlines()
    assert head.split()[:3] == ["module", "op", "kernel"]
    ours = [row for row in rows if "oxytorch::" in row]
    assert [row.startswith("(the model)  ") for row in ours] == [True, True, False]
    assert ours[-1].startswith("-  ")
    assert "module" not in _noted(lambda: model(x))[1]


def test_modules_are_those_of_each_thread() -> None:
    model, x = _Nested().eval(), torch.randn(4, 64)
    is_inside, may_go_on = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        is_inside.set()
        may_go_on.wait(10)

    model.again.register_forward_hook(wait)

    def run() -> None:
        thread = threading.Thread(target=lambda: model(x))
        thread.start()
        is_inside.wait(10)
        ops.interaction(x, [x])
        may_go_on.set()
        thread.join()

    with torch.no_grad(), oxytorch.verbose(io.StringIO(), model) as log:
        run()
    assert [row.module for row in log.rows if row.op == "interaction"] == [None]
    assert "" in [row.module for row in log.rows if row.op == "softmax"]


def test_modules_after_a_failed_call() -> None:
    model, x = _Nested().eval(), torch.randn(4, 64)

    def run() -> None:
        with pytest.raises(ValueError, match="no such input"):
            model(x, fails=True)
        ops.softmax(x)

    assert _places(model, run)[-2:] == [("", "rms_norm"), (None, "softmax")]


@pytest.mark.parametrize("graph", [False, True])
def test_optimized_models_run_layer_by_layer_where_modules_are_asked_for(graph: bool) -> None:
    x = torch.randn(16, 256)
    model = oxytorch.optimize(_model(), sample_input=x, passes=["program"] if graph else None)
    found = _places(model, lambda: model(x))
    assert {path for path, _ in found} <= {"0", "1", "2"}
    assert [path for path, _ in found] == sorted(str(path) for path, _ in found)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"model": "layer"}, "expected model to be a torch.nn.Module, got a str"),
        ({"model": torch.jit.script(nn.Identity())}, "TorchScript, whose parts take no hooks"),
        ({"file": nn.Identity()}, r"expected file .* got a Identity; .* verbose\(model=model\)"),
    ],
    ids=["text", "TorchScript", "model as file"],
)
def test_wrong_arguments_are_told(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(TypeError, match=f"verbose: .*{told}"):
        oxytorch.verbose(**arguments).__enter__()
    assert _noted(lambda: None)[0] == []


def _profiled(run: Any) -> set[str]:
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU]) as profiled:
        run()
    return {event.key for event in profiled.key_averages()}


def test_profiler_names_our_ops() -> None:
    x = torch.randn(3, 64)
    assert "oxytorch::rms_norm" in _profiled(lambda: ops.rms_norm(x))
    compiled = torch.compile(lambda x: F.layer_norm(x, (64,)) + 1, backend=compile_graph)
    with torch.no_grad():
        compiled(x)
    assert "oxytorch::layer_norm" in _profiled(lambda: compiled(x))


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.LayerNorm(512)).eval()


def _saved(model: nn.Module, x: Tensor, path: Path) -> Any:
    oxytorch.save(model, path, sample_input=x)
    return oxytorch.load(path)


def _generating(model: Any) -> Callable[[Tensor], Any]:
    return lambda x: oxytorch.llm.generate(model, torch.arange(5)[None], max_new_tokens=8)


WAYS: dict[str, Callable[[Tensor, Path], Callable[[Tensor], Any]]] = {
    "layers": lambda x, _: oxytorch.optimize(_model()),
    "regions": lambda x, _: oxytorch.optimize(_model(), sample_input=x, passes=["fuse", "pack"]),
    "program": lambda x, _: oxytorch.optimize(_model(), sample_input=x, passes=["program"]),
    "export": lambda x, _: oxytorch.optimize(torch.export.export(_model(), (x,))),
    "file": lambda x, path: _saved(_model(), x, path / "model.oxy"),
    "compiled": lambda x, _: torch.compile(_model(), backend=compile_graph),
    "TorchScript": lambda x, _: oxytorch.optimize(torch.jit.trace(_model(), x), sample_input=x),
    "integers": lambda x, _: oxytorch.quantize(_model(), [x]),
    "language model": lambda x, _: _generating(oxytorch.llm.optimize(tiny_llama())),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("way", WAYS)
def test_our_ops_are_named_in_each_way(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the profiler, and in the table of `verbose`, on any call."""
    monkeypatch.setattr("oxytorch.rewriting.measure.TIMED", False)
    x = torch.randn(16, 256)
    with torch.no_grad():
        run = WAYS[way](x, tmp_path)
        for _ in range(2):
            run(x)
    names = {name.partition(".")[0] for name in _profiled(lambda: run(x))}
    noted, _ = _noted(lambda: run(x))
    ours = {f"oxytorch::{row.op}" for row in noted if row.source == "oxytorch"}
    assert ours and ours <= names
