"""Importing changes nothing, costs little, and a missing library is one clear line."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import oxytorch
from oxytorch import _library

PACKAGE = Path(oxytorch.__file__).parent

# Prints as JSON what differs after the import: everything but our own names has to stay.
INNOCENCE = """
import json, os, sys, threading
import torch, torch.nn.functional, torch.optim, torch.fx, torch.library, torch.jit
try:
    import transformers
    from transformers.models.bert import modeling_bert
except ImportError:
    transformers = None

KEYS = ["CPU", "CUDA", "XPU", "Meta", "MkldnnCPU", "QuantizedCPU", "AutogradCPU", "Autograd",
        "CompositeImplicitAutograd", "CompositeExplicitAutograd", "AutocastCPU", "BackendSelect"]

def state():
    watched = [module for name, module in list(sys.modules.items())
               if name.split(".")[0] in ("torch", "transformers") and module is not None]
    attributes = {}
    for module in watched:
        for name, value in vars(module).items():
            attributes[f"{module.__name__}.{name}"] = id(value)
    for owner in (torch.Tensor, torch.nn.Module, torch.nn.Linear, torch.nn.LayerNorm,
                  torch.optim.Optimizer, torch.autograd.Function):
        for name, value in vars(owner).items():
            attributes[f"{owner.__qualname__}.{name}"] = id(value)
    registered = torch._C._dispatch_get_registrations_for_dispatch_key
    operators = {key: sorted(name for name in registered(key)
                             if not name.startswith("oxytorch::")) for key in KEYS}
    settings = {
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "tasks": len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0,
        "python_threads": threading.active_count(),
        "affinity": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [],
        "environment": dict(os.environ),
        "dtype": str(torch.get_default_dtype()),
        "grad": torch.is_grad_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "onednn": torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled,
        "flush_denormal": (torch.tensor([1e-40]) * 1).item() != 0,
        "cuda": torch.cuda.is_initialized(),
        "path": list(sys.path),
    }
    return attributes, operators, settings

before = state()
modules = set(sys.modules)
import oxytorch
new_modules = sorted(set(sys.modules) - modules)
after = state()
submodules = {id(module) for module in sys.modules.values()}
changed = [name for name, value in before[0].items() if after[0].get(name) != value]
added = [name for name, value in after[0].items()
         if name not in before[0] and value not in submodules
         and not name.startswith("torch.ops.")
         and name.rsplit(".", 1)[0] in modules]
print(json.dumps({
    "changed": changed,
    "added": added,
    "operators": [key for key in KEYS if before[1][key] != after[1][key]],
    "settings": [key for key in before[2] if before[2][key] != after[2][key]],
    "new_modules": new_modules,
}))
"""


def _run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "always", "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_import_is_innocent() -> None:
    result = _run(INNOCENCE)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["changed"] == []
    assert found["added"] == []
    assert found["operators"] == []
    assert found["settings"] == []


def test_import_loads_few_modules_and_none_that_is_heavy() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import oxytorch;"
        "print(*sorted(set(sys.modules) - before))"
    )
    new = _run(code).stdout.split()
    others = [name for name in new if name.split(".")[0] != "oxytorch"]
    assert len(others) <= 3, others
    assert len(new) <= 10, new
    for heavy in ("transformers", "rich", "matplotlib", "torch._dynamo", "torch._inductor"):
        assert heavy not in new


def _copy_of_package(target: Path) -> Path:
    shutil.copytree(
        PACKAGE, target / "oxytorch", ignore=shutil.ignore_patterns("__pycache__", "*.cpp", "*.h")
    )
    return target


USE = (
    "import torch, oxytorch; from oxytorch import isa, ops;"
    "x = torch.randn(3, 8); y = ops.rms_norm(x, torch.ones(8));"
    "torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (8,), eps=1e-6));"
    "normed, total = ops.add_rms_norm(x, x);"
    "print(oxytorch.__file__, isa.active(), isa.why(), isa.levels(), sep=' | ')"
)

# Puts the copied package before an editable install's own finder.
FIRST = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in type(f).__module__]
"""


def _use(tree: Path, prelude: str = "") -> tuple[str, str]:
    result = _run(FIRST + f"sys.path.insert(0, {str(tree)!r})\n" + prelude + USE)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(str(tree)), result.stdout
    warned = [line for line in result.stderr.splitlines() if "oxytorch runs its" in line]
    assert len(warned) == 1, result.stderr
    return result.stdout, warned[0]


def test_missing_library_warns_in_one_line_and_references_run(tmp_path: Path) -> None:
    tree = _copy_of_package(tmp_path)
    shutil.rmtree(tree / "oxytorch" / "lib", ignore_errors=True)
    shown, warned = _use(tree)
    assert "the compiled library is missing" in warned and "reinstall oxytorch" in warned
    assert "| reference | the compiled library is missing" in shown


def test_damaged_library_warns_in_one_line_and_references_run(tmp_path: Path) -> None:
    tree = _copy_of_package(tmp_path)
    library = tree / "oxytorch" / "lib" / _library.PATH.name
    library.parent.mkdir(exist_ok=True)
    library.write_bytes(b"\x7fELF damaged")
    shown, warned = _use(tree)
    assert "cannot be loaded" in warned
    assert "| reference |" in shown


def test_old_torch_warns_in_one_line_and_references_run(tmp_path: Path) -> None:
    tree = _copy_of_package(tmp_path)
    shown, warned = _use(tree, "import torch; torch.__version__ = '2.8.0'\n")
    assert "torch 2.8.0 is older than 2.10; upgrade torch" in warned
    assert "| reference | torch 2.8.0" in shown


# From the lowest layer to the highest: a module imports its own layer and those before it. What
# measures stands above all that it measures, and only the two command lines that call it by name
# stand above it. A module of a package can have a layer of its own.
LAYERS = [
    {"config", "_lazy", "_library", "_garbage"},
    {"isa", "core", "gpu", "math_mode", "verbose", "command_line"},
    {"ops"},
    {"rewriting", "graph"},
    {"program", "graph.explain", "graph.memory", "graph.__init__"},
    {"optimize", "optim"},
    {"quantization"},
    {"llm"},
    {
        "testing",
        "files",
        "runtime",
        "compat",
        "memory",
        "info",
        "aot",
        "demo",
        "launch",
        "llm_command",
        "serve",
        "__init__",
    },
    {"ray", "benchmark"},
    {"__main__", "llm_command.command"},
]
MODULE_NAME = re.compile(r"oxytorch(\.\w+)+")


def _layer(module: str) -> int:
    name = module.split(".")[0] or "__init__"
    for own in (module, name):
        found = [index for index, layer in enumerate(LAYERS) if own in layer]
        if found:
            return found[0]
    raise AssertionError(f"add {name!r} to LAYERS of {__name__}")


def _is_module(parts: list[str]) -> bool:
    place = PACKAGE.parent.joinpath(*parts)
    return place.is_dir() or place.with_suffix(".py").is_file()


def _imports(path: Path) -> list[str]:
    """Modules of the package that a file imports or names in a string, by name inside the package.

    Strings are what `importlib` is given, there or elsewhere: "oxytorch.info", "oxytorch.info:run".
    """
    here = ["oxytorch", *path.relative_to(PACKAGE).with_suffix("").parts]
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level] if node.level else []
            package = ".".join(base + ([node.module] if node.module else []))
            found += (
                [f"{package}.{alias.name}" for alias in node.names]
                if package == "oxytorch"
                else [package]
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value.partition(":")[0]
            found += [name] if MODULE_NAME.fullmatch(name) and _is_module(name.split(".")) else []
    return [name.removeprefix("oxytorch.") for name in found if name.startswith("oxytorch.")]


def test_imports_point_down() -> None:
    public = {"__version__", "optimize", "explain", "undo"}
    for path in sorted(PACKAGE.rglob("*.py")):
        own = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        for name in _imports(path):
            if name in public:
                continue
            assert _layer(name) <= _layer(own), f"{path.relative_to(PACKAGE)} imports {name}"


def _private_imports(path: Path) -> list[str]:
    """Underscored modules that a file imports from a package that it does not lie in."""
    here = ["oxytorch", *path.relative_to(PACKAGE).with_suffix("").parts]
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level] if node.level else []
            base += (node.module or "").split(".") if node.module else []
            names = [alias.name for alias in node.names]
            modules = [base + ([name] if _is_module([*base, name]) else []) for name in names]
        else:
            continue
        for parts in modules:
            private = [i for i, part in enumerate(parts) if re.match("_[a-z]", part)]
            if parts[0] == "oxytorch" and any(parts[:i] != here[:i] for i in private):
                found.append(".".join(parts[1:]))
    return found


def test_underscored_modules_are_their_packages_own() -> None:
    found = {
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for name in _private_imports(path)
    }
    assert found == set()


def test_only_config_reads_the_environment() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name == "config.py" or "benchmark" in path.parts or "demo" in path.parts:
            continue
        if path.relative_to(PACKAGE) == Path("launch/binding.py"):
            continue  # a program by itself, which the package is not imported in
        for node in ast.walk(ast.parse(path.read_text())):
            name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            assert name not in ("os.environ", "os.getenv"), path


@pytest.mark.parametrize("name", oxytorch.__all__)
def test_public_names_exist(name: str) -> None:
    assert hasattr(oxytorch, name)
