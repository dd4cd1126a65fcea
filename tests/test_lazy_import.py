"""What is imported at first use is there from the start: names, ops, pickles, TorchScript."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import oxytorch
from marks import NEEDS_LIBRARY
from oxytorch import ops

needs_library = NEEDS_LIBRARY


def _run(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_takes_little_time() -> None:
    """The least of several processes; measured are about 20 ms, and 200 before names were lazy."""
    code = (
        "import time, torch; began = time.perf_counter(); import oxytorch;"
        "print(time.perf_counter() - began)"
    )
    seconds = [float(_run(code)) for _ in range(5)]
    assert min(seconds) < 0.06, f"median {statistics.median(seconds)}"


NAMES = """
import sys, types
import oxytorch
assert not {"oxytorch.optimize", "oxytorch.optim", "oxytorch.ops.softmax"} & set(sys.modules)
for package in (oxytorch, oxytorch.ops):
    assert set(package.__all__) <= set(dir(package))
    for name in package.__all__:
        value = getattr(package, name)
        assert value is getattr(package, name), name
        is_module = name in ("compat", "config", "graph", "isa", "llm", "memory", "ops", "optim",
                             "quantization", "runtime")
        assert isinstance(value, types.ModuleType) == is_module, name
    assert not hasattr(package, "nonsense")
"""


def test_public_names_are_there_when_they_are_asked_for() -> None:
    _run(NAMES)


@pytest.mark.parametrize(
    "first",
    [
        "import oxytorch.optimize",
        "import oxytorch.optimize.verify",
        "from oxytorch.optimize.verify import compare",
        "from oxytorch.optimize import PASSES",
        "import oxytorch.llm",
        "import oxytorch.ops.softmax",
        "from oxytorch.ops.softmax import samples",
        "from oxytorch.ops import softmax",
        "from oxytorch import optimize",
        "import importlib; importlib.import_module('oxytorch.ops.softmax')",
    ],
)
def test_a_function_has_its_name_however_its_module_is_imported(first: str) -> None:
    code = (
        f"{first}\nimport oxytorch, types\n"
        "assert isinstance(oxytorch.optimize, types.FunctionType), oxytorch.optimize\n"
        "assert isinstance(oxytorch.ops.softmax, types.FunctionType), oxytorch.ops.softmax\n"
        "from oxytorch.ops import softmax\nfrom oxytorch import optimize\n"
        "assert softmax is oxytorch.ops.softmax and optimize is oxytorch.optimize"
    )
    _run(code)


def test_missing_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'oxytorch' has no attribute 'nonsense'"):
        _ = oxytorch.nonsense  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"module 'oxytorch.ops' has no attribute 'nonsense'"):
        _ = ops.nonsense  # type: ignore[attr-defined]


@needs_library
def test_every_op_with_a_reference_is_connected_at_import() -> None:
    names = {name for name in torch._C._dispatch_get_all_op_names() if "::" in name}
    with_reference = {
        name.removeprefix("oxytorch::").removesuffix(".reference")
        for name in names
        if name.startswith("oxytorch::") and name.endswith(".reference")
    }
    used_by_tests = {"scale", "faulty"}
    assert with_reference - used_by_tests == set(ops._NAMES)


# Every op once in a fresh process, through the dispatcher alone. Some modules import others.
FIRST_USE = """
import sys
import torch
import oxytorch

way, path = sys.argv[1:]
calls = torch.load(path)

def change(value, function):
    if isinstance(value, torch.Tensor):
        return function(value)
    return [change(part, function) for part in value] if isinstance(value, list) else value

def floats(function):
    return lambda t: function(t) if t.is_floating_point() else t

def tensors(value):
    return [value] if isinstance(value, torch.Tensor) else list(value or ())

first_uses = 0
for name, (arguments, shapes, has_gradient) in calls.items():
    module = f"oxytorch.ops.{name}"
    first_uses += module not in sys.modules
    op = getattr(torch.ops.oxytorch, name)
    if way == "kernel":
        with torch.inference_mode():
            result = op(*arguments)
        assert first_uses > 0 and module not in sys.modules, "the kernel needs no Python"
    elif way == "float64":
        if not all(t.is_floating_point() for t in tensors(arguments[0])):
            continue  # the first argument decides, and bytes are float32's
        result = op(*change(arguments, floats(torch.Tensor.double)))
    elif way == "fake":
        from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
        with FakeTensorMode() as mode:
            result = op(*change(arguments, mode.from_tensor))
        assert all(isinstance(t, FakeTensor) for t in tensors(result))
        again = op(*arguments)
        assert not any(isinstance(t, FakeTensor) for t in tensors(again))
    elif way == "gradient":
        if not has_gradient:
            continue
        leaves = change(arguments, floats(lambda t: t.clone().requires_grad_()))
        result = op(*leaves)
        total = sum(t.float().sum() for t in tensors(result))
        assert total.requires_grad, name
        total.backward()
    assert [list(t.shape) for t in tensors(result)] == shapes, name
    assert way == "kernel" or module in sys.modules
print(first_uses)
"""


@needs_library
@pytest.mark.parametrize("way", ["kernel", "float64", "fake", "gradient"])
def test_ops_work_through_the_dispatcher_before_their_modules_are_imported(
    way: str, tmp_path: Path
) -> None:
    calls = {}
    for name, op in ops.registry().items():
        sample = next(iter(op.samples(torch.float32, "test")))
        schema = getattr(torch.ops.oxytorch, name).default._schema
        given = dict(
            zip((argument.name for argument in schema.arguments), sample.args, strict=False)
        )
        given |= sample.kwargs
        arguments = [given.get(a.name, a.default_value) for a in schema.arguments]
        arguments = [[*value] if isinstance(value, tuple) else value for value in arguments]
        with torch.no_grad():
            result = getattr(torch.ops.oxytorch, name)(*arguments)
        results = [result] if isinstance(result, Tensor) else result or ()
        shapes = [list(t.shape) for t in results]
        calls[name] = arguments, shapes, op.has_gradient and name != "merged_embedding_bag"
    path = tmp_path / "calls.pt"
    torch.save(calls, path)
    assert int(_run(FIRST_USE, way, str(path))) >= 10


NO_TENSORS = """
import pkgutil
import torch
from torch.utils._python_dispatch import TorchDispatchMode
import oxytorch, oxytorch.ops

class Refuse(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} runs while a module is imported")

count = 0
with Refuse():
    for module in pkgutil.walk_packages(oxytorch.ops.__path__, "oxytorch.ops."):
        if "triton" not in module.name and "__main__" not in module.name:
            __import__(module.name)
            count += 1
print(count)
"""


def test_no_op_makes_tensors_when_it_is_imported() -> None:
    """It may be imported at its first use, under a mode that would take hold of them."""
    assert int(_run(NO_TENSORS)) > 30


class Network(nn.Module):
    """Convolution, normalization, linear layers and activations."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 16, 3)
        self.norm = nn.LayerNorm(16)
        self.first = nn.Linear(16, 32)
        self.second = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.convolution(x)).mean((2, 3))
        return torch.softmax(self.second(nn.functional.gelu(self.first(self.norm(hidden)))), -1)


LOAD = """
import sys
sys.path.insert(0, sys.argv[2])
import torch
import oxytorch
model, x, expected = torch.load(sys.argv[1], weights_only=False)
with torch.no_grad():
    torch.testing.assert_close(model(x), expected)
print(oxytorch.explain(model).model)
"""


@pytest.mark.parametrize("with_sample", [False, True])
def test_an_optimized_model_is_loaded_where_only_oxytorch_is_imported(
    with_sample: bool, tmp_path: Path
) -> None:
    x = torch.randn(2, 3, 12, 12)
    model = Network().eval()
    optimized = oxytorch.optimize(model, sample_input=x if with_sample else None)
    with torch.no_grad():
        expected = optimized(x)
    path = tmp_path / "model.pt"
    torch.save((optimized, x, expected), path)
    assert _run(LOAD, str(path), str(Path(__file__).parent)) == "Network\n"


SCRIPT = """
import sys
import torch
import oxytorch
function = torch.jit.load(sys.argv[1])
x = torch.arange(24.0).reshape(3, 8)
y = function(x)
torch.testing.assert_close(y, torch.softmax(x * 0.5, -1))
leaf = x.clone().requires_grad_()
function(leaf)[0, 0].backward()
assert leaf.grad is not None and leaf.grad.abs().sum() > 0
torch.testing.assert_close(function(x.double()), torch.softmax(x.double() * 0.5, -1))
print("loaded")
"""


@needs_library
def test_torchscript_is_loaded_where_only_oxytorch_is_imported(tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = torch.ops.oxytorch.softmax(x, 0.5)
            return result

    path = tmp_path / "scripted.pt"
    torch.jit.script(Scaled()).save(str(path))
    assert _run(SCRIPT, str(path)) == "loaded\n"
