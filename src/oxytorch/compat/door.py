"""`install`: programs that import the predecessor get oxytorch; `uninstall` takes that back."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from . import torchscript
from .errors import OLD
from .names import NAMES, NAMESPACES
from .namespace import Namespace, names_below

BACKEND, COMPILER = "ipex", "oxytorch.program.backend:compile_graph"
_REGISTRY = "torch._dynamo.backends.registry"


class _Loader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Namespace(spec.name, spec.name.removeprefix(OLD).lstrip("."))

    def exec_module(self, module: ModuleType) -> None:
        """Names are looked up when they are asked for."""


class _Entries(importlib.metadata.Distribution):
    """Tells torch's compiler, which looks for backends once it is used, of one named "ipex"."""

    def read_text(self, filename: str) -> str | None:
        if filename == "METADATA":
            return "Metadata-Version: 2.1\nName: oxytorch-compat\nVersion: 0\n"
        if filename == "entry_points.txt":
            return f"[torch_dynamo_backends]\n{BACKEND} = {COMPILER}\n"
        return None

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(path)


class Finder(MetaPathFinder):
    """Finds the predecessor's package and its modules."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        root, _, below = name.partition(".")
        if root != OLD or (below and below not in NAMESPACES):
            return None
        return ModuleSpec(name, _Loader(), is_package=True, origin="oxytorch.compat")

    def find_distributions(self, context: Any = None) -> Iterator[importlib.metadata.Distribution]:
        if context is None or context.name in (None, "oxytorch-compat"):
            yield _Entries()

    def __str__(self) -> str:
        return f"`import {OLD}` finds oxytorch.compat.ipex"


installed: Finder | None = None
"""What `install` put into `sys.meta_path`; None before and after."""
_NONE = object()
_changed: list[tuple[Any, str, Any]] = []
"""Objects, names of their attributes, and what these were."""


def install(force: bool = False) -> None:
    """Have `import intel_extension_for_pytorch` find oxytorch, in this process.

    It also adds `torch.ops.torch_ipex`, functions that the predecessor had added to `torch.xpu`,
    and a backend "ipex" of `torch.compile`. `torch.jit.trace` and `torch.jit.freeze` are replaced:
    of models that `optimize` returned, modules of TorchScript are optimized when they are frozen.
    `Tensor.numpy` gives float32 for bfloat16, which NumPy lacks. `uninstall` takes it all back,
    and `oxytorch info` shows it.

    force: also where the predecessor itself is installed, which is not imported then.

    Raises RuntimeError where the predecessor is installed or was imported already.
    """
    global installed
    if installed is not None:
        return
    if OLD in sys.modules:
        raise RuntimeError(
            f"install: {OLD} was imported in this process already; call "
            "oxytorch.compat.install() before that"
        )
    if not force and importlib.util.find_spec(OLD) is not None:
        raise RuntimeError(
            f"install: {OLD} itself is installed here; uninstall it (pip uninstall {OLD}), or "
            "pass force=True to use oxytorch in its place"
        )
    installed = Finder()
    sys.meta_path.insert(0, installed)
    ours: Any = importlib.import_module("oxytorch.compat.ipex")
    _set(torch.ops, "torch_ipex", ours.torch_ipex)
    for name in names_below("xpu"):
        known = NAMES.get(f"xpu.{name}")
        if not hasattr(torch.xpu, name) and not (known and known.is_value):
            _set(torch.xpu, name, getattr(ours.xpu, name))
    _set(torch.Tensor, "numpy", numpy)
    _set(torch.jit, "trace", torchscript.tracing(torch.jit.trace))
    _set(torch.jit, "freeze", torchscript.freezing(torch.jit.freeze))
    registry = sys.modules.get(_REGISTRY)
    if registry is not None:  # it may have looked for backends already
        place, _, attribute = COMPILER.partition(":")
        function = getattr(importlib.import_module(place), attribute)
        registry.register_backend(function, name=BACKEND)


def uninstall() -> None:
    """Take back what `install` did, however often that was called; without it, do nothing.

    Modules that a program imported meanwhile stay with it.
    """
    global installed
    if installed is None:
        return
    sys.meta_path.remove(installed)
    installed = None
    for name in [name for name in sys.modules if name.partition(".")[0] == OLD]:
        del sys.modules[name]
    while _changed:
        owner, name, before = _changed.pop()
        if before is _NONE:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
    registry: Any = sys.modules.get(_REGISTRY)
    if registry is not None:
        for table in (registry._BACKENDS, registry._COMPILER_FNS):
            table.pop(BACKEND, None)


def numpy(self: torch.Tensor, *, force: bool = False) -> Any:
    """`Tensor.numpy`; of bfloat16, which NumPy does not have, the values in float32."""
    values = self.float() if self.dtype == torch.bfloat16 else self
    return _to_numpy(values, force=force)


_to_numpy = torch.Tensor.numpy


def _set(owner: Any, name: str, value: Any) -> None:
    _changed.append((owner, name, vars(owner).get(name, _NONE)))
    setattr(owner, name, value)
