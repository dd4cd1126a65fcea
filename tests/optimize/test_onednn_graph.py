"""Pass `onednn_graph`: oneDNN's graphs give the model's answers, and only where they hold."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from counting import counts_original
from torch import Tensor, nn
from zoo import build, call

import oxytorch
from oxytorch.graph.onednn_graph import OneDnnProgram, available
from oxytorch.graph.replay import Replay
from oxytorch.optimize import DEFAULT
from oxytorch.optimize.context import Context
from oxytorch.optimize.passes import precision
from oxytorch.optimize.passes.onednn_graph import MOST_FORMS

pytestmark = pytest.mark.skipif(not available(), reason="torch without oneDNN's graph compiler")
bfloat16_only = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN without bfloat16 here"
)
PASSES = (*DEFAULT, "onednn_graph")


class Residual(nn.Module):
    """Two convolutions with normalization around which the input is added."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.second(torch.relu(self.norm(self.first(x)))))


class Branching(nn.Module):
    """A data-dependent branch around a part without one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = Residual()
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x).mean((2, 3))
        return self.head(y) if bool(x.sum() > 0) else -self.head(y)


class Anchored(nn.Module):
    """Adds a tensor that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Residual()
        self.offset = torch.ones(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.offset


def _network() -> nn.Sequential:
    torch.manual_seed(0)
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), Residual(), nn.MaxPool2d(2), *head)
    norm = model[1].norm
    norm.running_mean.normal_(0, 0.2)
    norm.running_var.uniform_(0.5, 2)
    return model.eval()


def _image(size: int = 20) -> Tensor:
    return torch.randn(2, 3, size, size)


def _entries(model: nn.Module) -> list[Any]:
    return [e for e in oxytorch.explain(model).entries if e.pass_name == "onednn_graph"]


def _reasons(model: nn.Module) -> str:
    return " | ".join(e.detail for e in _entries(model) if not e.done)


def _compiled(model: nn.Module, sample: Any, **options: Any) -> nn.Module:
    optimized = oxytorch.optimize(model, sample_input=sample, passes=PASSES, **options)
    assert _is_compiled(optimized), _reasons(optimized)
    return optimized


def _is_compiled(module: nn.Module) -> bool:
    forward = module.__dict__.get("forward")
    return isinstance(forward, Replay) and isinstance(forward.programs()[0], OneDnnProgram)


@pytest.mark.parametrize("name", ["resnet", "mobilenet"])
def test_whole_networks(name: str) -> None:
    model, _ = build(name)
    sample = (torch.randn(2, 3, 64, 64),)  # oneDNN refuses depthwise convolutions of one pixel
    optimized = _compiled(model, sample, verify=True)
    assert "MiB" in _entries(optimized)[0].detail
    assert not any(e.pass_name in ("fuse", "pack") for e in oxytorch.explain(optimized).done)
    with torch.no_grad():
        for x in (sample[0], -sample[0], sample[0].roll(1, 0)):
            torch.testing.assert_close(
                call(optimized, (x,)), call(model, (x,)), rtol=1e-3, atol=1e-3
            )
    keys = {k: v.shape for k, v in model.state_dict().items()}
    assert {k: v.shape for k, v in optimized.state_dict().items()} == keys
    assert all(map(torch.equal, model.state_dict().values(), optimized.state_dict().values()))


@bfloat16_only
def test_bfloat16() -> None:
    model, x = _network(), _image()
    before = copy.deepcopy(model.state_dict())
    optimized = _compiled(model, x, dtype=torch.bfloat16, verify=True)
    with torch.inference_mode():
        found = optimized(x)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.float(), model(x), rtol=5e-2, atol=5e-2)
        strided = x.contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(optimized(strided).float(), model(x), rtol=5e-2, atol=5e-2)
    assert optimized[0].weight.dtype == torch.bfloat16
    assert optimized[1].norm.weight.dtype == torch.float32
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    oxytorch.undo(optimized)
    assert optimized[0].weight.dtype == torch.float32


@bfloat16_only
def test_what_is_refused_in_bfloat16_is_left_to_the_other_passes() -> None:
    model, x = Branching().eval(), torch.randn(2, 8, 6, 6)
    optimized = oxytorch.optimize(
        model, dtype=torch.bfloat16, sample_input=x, passes=["onednn_graph", "cast"]
    )
    assert _is_compiled(optimized.stem)
    cast = [e.module for e in oxytorch.explain(optimized).done if e.pass_name == "cast"]
    assert sorted(cast) == ["", "head", "stem.first", "stem.second"]  # "": what it is called with
    assert torch.equal(optimized.head.weight, model.head.weight.bfloat16())
    with torch.no_grad():
        for value in (x, -x):
            torch.testing.assert_close(optimized(value).float(), model(value), rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_compiled_calls_do_not_reach_the_forward(mode: Any) -> None:
    model = _network()
    optimized = _compiled(model, _image())
    calls = counts_original(optimized)
    with mode():
        for _ in range(3):
            x = _image()
            kept = x.clone()
            torch.testing.assert_close(optimized(x), model(x), rtol=1e-4, atol=1e-4)
            assert torch.equal(x, kept)
    assert not calls


FORMS: dict[str, Callable[[], Tensor]] = {
    "channels_last": lambda: torch.randn(2, 8, 9, 7).contiguous(memory_format=torch.channels_last),
    "columns": lambda: torch.randn(2, 8, 9, 40)[..., :7],
    "every_second": lambda: torch.randn(2, 8, 18, 7)[:, :, ::2],
    "channels": lambda: torch.randn(2, 30, 9, 7)[:, 3:11],
    "part_of_channels_last": lambda: torch.randn(2, 9, 7, 16)[..., :8].permute(0, 3, 1, 2),
    "turned": lambda: torch.randn(2, 8, 7, 9).mT,
    "batch_last": lambda: torch.randn(8, 9, 7, 2).permute(3, 0, 1, 2),
    "expanded": lambda: torch.randn(1, 8, 9, 1).expand(2, 8, 9, 7),
    "offset": lambda: torch.randn(1011)[3:].view(2, 8, 9, 7),
}
"""Ways in which an image may lie in memory. What is compiled for one reads over its end in another,
which ends the process."""


@pytest.mark.parametrize("before", ["residual", "plain"])
@pytest.mark.parametrize("name", [*FORMS])
def test_images_of_any_strides(name: str, before: str) -> None:
    torch.manual_seed(0)
    body = Residual() if before == "residual" else nn.Conv2d(8, 8, 3)
    model = nn.Sequential(body, nn.Conv2d(8, 4, 1)).eval()
    optimized = _compiled(model, FORMS[name]())
    calls = counts_original(optimized)
    with torch.no_grad():
        for _ in range(3):
            x = FORMS[name]()
            found, wanted = optimized(x), model(x)
            assert found.stride() == wanted.stride()
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
        assert not calls
        for other in FORMS.values():
            x = other()
            torch.testing.assert_close(optimized(x), model(x), atol=1e-4, rtol=1e-4)


def test_a_program_refuses_other_strides() -> None:
    optimized = _compiled(_network(), _image())
    (program,) = optimized.__dict__["forward"].programs()
    assert program([_image()]) is not None
    assert program([_image().contiguous(memory_format=torch.channels_last)]) is None
    assert program([_image(40)[..., ::2, ::2]]) is None
    assert program([_image(24)]) is None


def test_an_input_over_itself_is_refused() -> None:
    x = torch.randn(200).as_strided((2, 3, 8, 8), (20, 10, 5, 1))
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)).eval()
    optimized = oxytorch.optimize(model, sample_input=x, passes=["onednn_graph"])
    assert "share memory" in _reasons(optimized)
    with torch.no_grad():
        torch.testing.assert_close(optimized(x), model(x))


@pytest.mark.parametrize("where", ["_compile", "__call__"])
def test_errors_of_onednn_while_it_compiles_are_a_refusal(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*given: Any) -> Any:
        raise RuntimeError("could not create a memory")

    model, x = _network(), _image()
    monkeypatch.setattr(OneDnnProgram, where, fails)
    optimized = oxytorch.optimize(model, sample_input=x, passes=PASSES)
    assert "could not create a memory" in _reasons(optimized)
    with torch.no_grad():
        torch.testing.assert_close(optimized(x), model(x), atol=1e-4, rtol=1e-4)


def test_a_module_that_fails_on_another_input_is_refused() -> None:
    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3))
            self.table = nn.Embedding(3, 8)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return self.body(x) + self.table(labels[:, 0])[:, :, None, None]

    model, x, labels = Chosen().eval(), torch.randn(1, 8, 9, 9), torch.tensor([[1, 5]])
    optimized = oxytorch.optimize(model, sample_input=(x, labels), passes=PASSES)
    assert "a run of it fails, IndexError: index out of range" in _reasons(optimized)
    with torch.no_grad():
        torch.testing.assert_close(optimized(x, labels), model(x, labels), atol=1e-4, rtol=1e-4)


def test_errors_of_onednn_at_a_call_run_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, failures = _network(), _image(), []
    optimized = _compiled(model, x)

    def fails(*given: Any) -> Any:
        failures.append(1)
        raise RuntimeError("could not create a memory")

    monkeypatch.setattr(OneDnnProgram, "__call__", fails)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(optimized(x), model(x), atol=1e-4, rtol=1e-4)
    assert len(failures) == 1


def test_what_is_put_in_later_is_followed() -> None:
    class Asking(Residual):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * getattr(self, "factor", 1.0)

    model = nn.Sequential(Asking()).eval()
    x = torch.randn(1, 8, 9, 9)
    optimized = _compiled(model, x)
    with torch.no_grad():
        optimized(x)
        model[0].factor = optimized[0].factor = 2.0
        for _ in range(3):
            torch.testing.assert_close(optimized(x), model(x), atol=1e-4, rtol=1e-4)


def test_results_of_two_calls_are_apart() -> None:
    optimized = _compiled(_network(), _image())
    with torch.no_grad():
        first = optimized(_image())
        kept = first.clone()
        optimized(_image())
    assert torch.equal(first, kept)


def test_a_branch_on_values_is_refused_and_its_parts_are_not() -> None:
    model, x = Branching().eval(), torch.randn(2, 8, 6, 6)
    optimized = oxytorch.optimize(model, sample_input=x, passes=PASSES)
    assert "reads values" in _reasons(optimized)
    assert "forward" not in optimized.__dict__ or not _is_compiled(optimized)
    assert _is_compiled(optimized.stem)
    with torch.no_grad():
        for value in (x, -x, x + 1, x - 1):
            torch.testing.assert_close(optimized(value), model(value), rtol=1e-4, atol=1e-4)


def test_other_sizes_run() -> None:
    model = _network()
    optimized = _compiled(model, _image())
    with torch.no_grad():
        for size in range(16, 16 + 2 * MOST_FORMS):
            for _ in range(3):
                x = _image(size)
                torch.testing.assert_close(optimized(x), model(x), rtol=1e-4, atol=1e-4)
    assert len(optimized.__dict__["forward"].programs()) == MOST_FORMS


def test_new_weights_are_seen() -> None:
    model, x = _network(), _image()
    optimized, other = _compiled(model, x), copy.deepcopy(model)
    with torch.no_grad():
        for tensor in (*other.parameters(), other[1].norm.running_mean):
            tensor.add_(0.1)
        optimized.load_state_dict(other.state_dict())
        for _ in range(3):
            torch.testing.assert_close(optimized(x), other(x), rtol=1e-4, atol=1e-4)
        for target in (optimized, other):
            target[1].norm.running_var.mul_(2.0)
        for _ in range(3):
            torch.testing.assert_close(optimized(x), other(x), rtol=1e-4, atol=1e-4)
        calls = counts_original(optimized)
        optimized(x)
        assert not calls


def test_constants_that_are_no_parameters_are_watched() -> None:
    model, x = Anchored().eval(), torch.randn(2, 8, 6, 6)
    optimized = _compiled(model, x)
    with torch.no_grad():
        for _ in range(8):
            for target in (model, optimized):
                target.offset.add_(1.0)
            torch.testing.assert_close(optimized(x), model(x), rtol=1e-4, atol=1e-4)


def test_guards_call_the_forward() -> None:
    model, x = _network(), _image()
    optimized = _compiled(model, x)
    calls = counts_original(optimized)
    found = torch.autograd.grad(optimized(x.requires_grad_()).sum(), x)[0]
    wanted = torch.autograd.grad(model(x).sum(), x)[0]
    torch.testing.assert_close(found, wanted)
    assert len(calls) == 1, "gradients"
    x = x.detach()
    with torch.no_grad():
        seen: list[Any] = []
        handle = optimized[1].norm.register_forward_hook(lambda *call: seen.append(call))
        optimized(x)
        handle.remove()
        assert seen
        assert len(calls) == 2, "a hook"
        optimized[1].norm.train()
        before = optimized[1].norm.running_mean.clone()
        optimized(x)
        assert len(calls) == 3, "training mode"
        assert not torch.equal(before, optimized[1].norm.running_mean)


def test_a_hook_is_refused() -> None:
    model = _network()
    model[1].register_forward_hook(lambda *call: None)
    optimized = oxytorch.optimize(model, sample_input=_image(), passes=PASSES)
    assert "1 has a hook" in _reasons(optimized)
    assert not any(e.done for e in _entries(optimized))


def test_a_weight_shared_with_the_outside_is_refused() -> None:
    model = nn.ModuleDict({"one": Residual(), "two": Residual()}).eval()
    model["two"].first.weight = model["one"].first.weight

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: Tensor) -> Tensor:
            y = self.parts["two"](self.parts["one"](x))
            return y if bool(x.sum() > -1e9) else x

    whole, x = Both().eval(), torch.randn(2, 8, 6, 6)
    optimized = oxytorch.optimize(whole, sample_input=x, passes=PASSES)
    assert "shares a weight with parts.two.first" in _reasons(optimized)
    with torch.no_grad():
        torch.testing.assert_close(optimized(x), whole(x), rtol=1e-4, atol=1e-4)


def test_weights_made_in_inference_mode_are_refused() -> None:
    with torch.inference_mode():
        model, x = _network(), _image()
    optimized = oxytorch.optimize(model, sample_input=x, passes=["onednn_graph"], inplace=True)
    assert "inference mode" in _reasons(optimized)


def test_few_convolutions_and_no_sample_input() -> None:
    one = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval()
    assert not _entries(oxytorch.optimize(one, sample_input=_image(), passes=PASSES))
    optimized = oxytorch.optimize(_network(), passes=PASSES)
    assert "sample_input" in _reasons(optimized)


def test_program_leaves_it_alone() -> None:
    optimized = _compiled_with_program()
    assert "oneDNN" in " ".join(
        e.detail for e in oxytorch.explain(optimized).entries if e.pass_name == "program"
    )


def _compiled_with_program() -> nn.Module:
    passes = (*PASSES, "program")
    optimized = oxytorch.optimize(_network(), sample_input=_image(), passes=passes)
    assert _is_compiled(optimized)
    return optimized


def test_undo_copy_and_pickle() -> None:
    model, x = _network(), _image()
    optimized = _compiled(model, x)
    with torch.no_grad():
        wanted = model(x)
        for copied in (copy.deepcopy(optimized), pickle.loads(pickle.dumps(optimized))):
            for _ in range(3):
                torch.testing.assert_close(copied(x), wanted, rtol=1e-4, atol=1e-4)
            assert copied.__dict__["forward"].module is copied
            assert _is_compiled(copied)
        oxytorch.undo(optimized)
        assert not any("forward" in m.__dict__ for m in optimized.modules())
        assert torch.equal(optimized(x), wanted)


@pytest.mark.parametrize("before", [False, True])
def test_the_switch_is_put_back(before: bool) -> None:
    was = torch._C._jit_llga_enabled()
    torch.jit.enable_onednn_fusion(before)
    try:
        _compiled(_network(), _image())
        assert torch._C._jit_llga_enabled() is before
    finally:
        torch.jit.enable_onednn_fusion(was)


def test_tune_tries_it() -> None:
    optimized = oxytorch.optimize(_network(), sample_input=_image(), tune=True)
    report = oxytorch.explain(optimized)
    assert report.tuned is not None
    assert any(name == "with onednn_graph" for name, _ in report.tuned["lines"])


_SWALLOWING: dict[str, nn.Module] = {
    "relu": nn.ReLU(),
    "relu6": nn.ReLU6(),
    "hardtanh": nn.Hardtanh(),
    "max_pool": nn.MaxPool2d(2, padding=1),
    "leaky_relu": nn.LeakyReLU(0.1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", [*_SWALLOWING])
def test_nan_and_infinity_come_out(name: str, value: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    part = _SWALLOWING[name]
    model = nn.Sequential(nn.Conv2d(3, 8, 3), part, nn.Conv2d(8, 8, 3), part).eval().to(dtype)
    x = _image().to(dtype)
    optimized = oxytorch.optimize(model, sample_input=x, passes=PASSES)
    spoiled = x.clone()
    spoiled[0, 0, 3, 3] = value
    with torch.no_grad():
        for given in (spoiled, x, spoiled, spoiled, x):
            expected, found = model(given), optimized(given)
            torch.testing.assert_close(found, expected, rtol=5e-2, atol=5e-2, equal_nan=True)
    if _is_compiled(optimized):
        assert len(optimized.__dict__["forward"].programs()) == 1


def test_a_weight_that_is_not_finite_is_refused() -> None:
    model = _network()
    with torch.no_grad():
        model[0].weight[0, 0, 0, 0] = float("nan")
    optimized = oxytorch.optimize(model, sample_input=_image(), passes=PASSES)
    assert "holds NaN or infinity" in _reasons(optimized)
    x = _image()
    with torch.no_grad():
        assert torch.equal(optimized(x).isnan(), model(x).isnan())


def test_float16_is_refused() -> None:
    model = _network().half()
    optimized = oxytorch.optimize(model, sample_input=_image().half(), passes=PASSES)
    assert "overflow in float16" in _reasons(optimized)


@bfloat16_only
@pytest.mark.parametrize("kept", ["0.", "1."])
def test_blocks_that_keep_their_dtype_amid_others(
    kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph is compiled before the rest of the model is converted, and fits it."""

    def leave(context: Context) -> None:
        layers = precision.candidates(context)
        precision.leave(context, {m for m in layers if context.paths[m].startswith(kept)})

    monkeypatch.setattr(precision, "choose", leave)
    model = nn.Sequential(Residual(), Residual(), nn.Flatten(), nn.Linear(8 * 64, 4)).eval()
    x = torch.randn(2, 8, 8, 8)
    optimized = oxytorch.optimize(model, dtype=torch.bfloat16, sample_input=x, passes=PASSES)
    with torch.no_grad():
        inner = optimized[:2](x.bfloat16())
        outer = optimized(x)
        assert inner.dtype == outer.dtype == torch.bfloat16
        torch.testing.assert_close(outer.float(), model(x), rtol=0.05, atol=0.05)
    reports = [str(entry) for entry in oxytorch.explain(optimized).entries]
    again = oxytorch.optimize(model, dtype=torch.bfloat16, sample_input=x, passes=PASSES)
    assert [str(entry) for entry in oxytorch.explain(again).entries] == reports
