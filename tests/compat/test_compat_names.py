"""Every name of the table is reached, in every way in which a program can ask for it."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import oxytorch.compat.ipex as ipex
from oxytorch.compat import NotServedError
from oxytorch.compat.names import NAMES, NAMESPACES, Name
from scripts import module_of


def module_with(name: Name, root: str) -> Any:
    path = name.path.rpartition(".")[0]
    return importlib.import_module(f"{root}.{path}" if path else root)


@pytest.mark.parametrize("root", ["oxytorch.compat.ipex", "intel_extension_for_pytorch"])
def test_every_name_is_served_or_says_what_to_do(root: str, installed: None) -> None:
    for name in NAMES.values():
        module, own = module_with(name, root), name.path.rpartition(".")[2]
        if name.home:
            assert getattr(module, own) is not None, name
            continue
        assert len(name.note) > 10
        with pytest.raises(NotServedError) as raised:
            getattr(module, own)(1, key=2)
        assert name.path in str(raised.value) and name.note in str(raised.value)
        assert own in dir(module)


def test_names_of_both_packages_are_the_same_objects(installed: None) -> None:
    old: Any = importlib.import_module("intel_extension_for_pytorch")
    assert old.optimize is ipex.optimize
    assert old.cpu.runtime.CPUPool is ipex.cpu.runtime.CPUPool
    assert old.__version__.startswith("2.8")


def test_modules_can_be_imported() -> None:
    for path in NAMESPACES:
        assert importlib.import_module(f"oxytorch.compat.ipex.{path}").__name__.endswith(path)


def test_unserved_names_refuse_every_use() -> None:
    from oxytorch.compat.ipex.llm.modules import PagedAttention

    assert not isinstance(1, PagedAttention)
    for use in (
        lambda: PagedAttention.reshape_and_cache(1),
        lambda: type("Own", (PagedAttention,), {}),
        lambda: PagedAttention().__enter__(),
    ):
        with pytest.raises((NotServedError, TypeError)):
            use()
    with pytest.raises(NotServedError, match="cached_attention"):
        ipex.llm.modules.IndirectAccessKVCacheAttention()


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match=r"docs/migrate\.md"):
        ipex.no_such_name  # noqa: B018
    with pytest.raises(ImportError):
        importlib.import_module("oxytorch.compat.ipex.no_such_module")


def test_importing_oxytorch_does_not_import_the_door_and_the_names_import_little() -> None:
    code = (
        "import sys, oxytorch; a = [m for m in sys.modules if 'compat' in m and 'oxytorch' in m];"
        "import oxytorch.compat.ipex as ipex;"
        "b = [m for m in ('oxytorch.optimize', 'oxytorch.quantization', 'transformers',"
        " 'torch._dynamo') if m in sys.modules];"
        "import torch; print(a, b, 'torch_ipex' in vars(torch.ops), dir(ipex)[:1] != [])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] [] False True"


def test_page_has_the_tables_of_the_code() -> None:
    root = Path(__file__).parents[2]
    tool = module_of(root / "tools" / "write_migrate.py")
    page = (root / "docs" / "migrate.md").read_text()
    assert tool.written(page) == page, "run: python tools/write_migrate.py"
    assert all(f"`{name.path.rpartition('.')[2]}`" in page for name in NAMES.values())
