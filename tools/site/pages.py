"""MkDocs hook: pages that lie outside docs/, files that pages link to, and the API reference.

Links in the repository's pages are relative to the file that holds them, so that they work in any
viewer of the repository. README.md is the first page of the site. Whatever else a page links to
outside docs/ becomes part of the site under repository/: a page, a copied file, or the list of a
folder's files.
"""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^( *)(```+|~~~+).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
IN_NAVIGATION = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"]
IN_NAVIGATION += ["benchmarks/README.md"]

# Page of the API reference: the module whose __all__ it shows, and what the page says first.
REFERENCE = {
    "oxytorch": ("oxytorch", "What `import oxytorch` gives."),
    "optimize": (
        "oxytorch.optimize",
        "`oxytorch.optimize` is [the function](oxytorch.md); `from oxytorch.optimize import ...` "
        "gives these as well. The guide is [optimize](../optimize.md).",
    ),
    "quantization": (
        "oxytorch.quantization",
        "Guides: [weights of 4 and 8 bits](../quantization.md), [layers of 8-bit "
        "integers](../int8.md).",
    ),
    "llm": ("oxytorch.llm", "The guide is [language models](../llm.md)."),
    "optim": ("oxytorch.optim", "The guide is [optimizers](../optim.md)."),
    "runtime": ("oxytorch.runtime", "The guide is [cores, tasks and streams](../running.md)."),
    "graph": ("oxytorch.graph", "See [`graph=True`](../graph.md)."),
    "memory": ("oxytorch.memory", "The guide is [memory](../memory.md)."),
    "isa": ("oxytorch.isa", "See [instruction-set levels](../isa.md)."),
    "compat": (
        "oxytorch.compat",
        "Every name of `oxytorch.compat.ipex` is in the table of "
        "[programs for Intel Extension for PyTorch](../migrate.md).",
    ),
}


def body_of(module: str) -> list[ast.stmt]:
    """The statements of a module's source."""
    base = ROOT / "src" / module.replace(".", "/")
    source = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    return ast.parse(source.read_text(encoding="utf-8")).body


def public_names(module: str) -> list[str]:
    """`__all__` of a module's source, or its public functions and classes in their order."""
    body = body_of(module)
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [str(name) for name in ast.literal_eval(node.value)]
    kinds = (ast.FunctionDef, ast.ClassDef)
    return [n.name for n in body if isinstance(n, kinds) and not n.name.startswith("_")]


def is_module(name: str) -> bool:
    base = ROOT / "src" / name.replace(".", "/")
    return base.is_dir() or base.with_suffix(".py").exists()


def is_function_and_module(name: str) -> bool:
    """Whether a name is a function, and in `from ... import` a module that defines it."""
    own = name.rpartition(".")[2]
    return is_module(name) and any(
        isinstance(node, ast.FunctionDef) and node.name == own for node in body_of(name)
    )


def reference_page(page: str) -> str:
    module, introduction = REFERENCE[page]
    names = public_names(module)
    if is_function_and_module(module):  # its functions are on the page of the package
        names = [name for name in names if name not in public_names("oxytorch")]
    lines = [f"# `{module}`", "", introduction, ""]
    for name in names:
        full = f"{module}.{name}"
        if is_function_and_module(full):
            options = ["    options:", f"      heading: {full}", f"      toc_label: {name}"]
            lines += [f"::: {full}.{name}", *options, ""]
        elif not name.startswith("__") and not is_module(full):
            lines += [f"::: {full}", ""]
    return "\n".join(lines)


def place(path: Path) -> str:
    """Where a file of the repository, or the list of a folder, lies in the site."""
    if path == ROOT / "README.md":
        return "index.md"
    if (path / "README.md").exists():
        return place(path / "README.md")
    if path.is_relative_to(ROOT / "docs"):
        return path.relative_to(ROOT / "docs").as_posix()
    name = "repository/" + path.relative_to(ROOT).as_posix()
    return name + "/files.md" if path.is_dir() else name


def linked(page: Path) -> list[Path]:
    """Files and folders of the repository that a page links to."""
    targets = LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8")))
    paths = [each[1].split("#")[0] for each in targets if "://" not in each[1]]
    resolved = [(page.parent / each).resolve() for each in paths if each]
    return [each for each in resolved if each.exists() and each.is_relative_to(ROOT)]


def folder_page(folder: Path) -> str:
    names = sorted(each.name for each in folder.iterdir() if not each.name.startswith("."))
    title = folder.relative_to(ROOT).as_posix()
    rows = [f"- [{name}]({name})" if (folder / name).is_file() else f"- {name}" for name in names]
    return "\n".join([f"# {title}", "", "Files of this folder of the repository:", "", *rows])


def on_files(files: Files, config: Any) -> Files:
    for page in REFERENCE:
        content = reference_page(page)
        files.append(File.generated(config, f"api/{page}.md", content=content))
    waiting = [ROOT / name for name in IN_NAVIGATION]
    waiting += [each for page in sorted((ROOT / "docs").rglob("*.md")) for each in linked(page)]
    seen: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path in seen or path.is_relative_to(ROOT / "docs"):
            continue
        seen.add(path)
        if (path / "README.md").exists():
            waiting.append(path / "README.md")
        elif path.is_dir():
            files.append(File.generated(config, place(path), content=folder_page(path)))
            waiting += [each for each in path.iterdir() if each.is_file()]
        else:
            files.append(File.generated(config, place(path), abs_src_path=str(path)))
            waiting += linked(path) if path.suffix == ".md" else []
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links of the repository's files, as links between places in the site."""
    source = page.file.abs_src_path
    if source is None:
        return markdown
    if page.file.src_uri == "index.md":
        page.meta["hide"] = ["navigation"]
    folder, here = Path(source).resolve().parent, page.file.src_uri

    def moved(found: re.Match[str]) -> str:
        path, mark, anchor = found[2].partition("#")
        target = (folder / path).resolve() if path and "://" not in path else None
        if target is None or not target.exists() or not target.is_relative_to(ROOT):
            return found[0]
        link = os.path.relpath(place(target), os.path.dirname(here) or ".")
        return f"{found[1]}{link}{mark}{anchor}{found[3]}"

    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [LINK.sub(moved, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, LINK.sub(moved, markdown[end:])])
