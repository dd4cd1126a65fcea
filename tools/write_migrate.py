"""Writes the generated tables of docs/migrate.md, between its markers, from the code."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

from oxytorch.compat.ipexrun import SPELLINGS, meanings
from oxytorch.compat.names import NAMES, Name
from oxytorch.rewriting import predecessor

TARGET = Path(__file__).parents[1] / "docs" / "migrate.md"


def names() -> str:
    """All names, a table for each module of theirs."""
    served = sum(bool(name.home) for name in NAMES.values())
    lines = [
        f"{len(NAMES)} names: {served} served, {len(NAMES) - served} answered with what to do.",
        "",
    ]
    modules: dict[str, list[Name]] = {}
    for name in NAMES.values():
        modules.setdefault(name.path.rpartition(".")[0], []).append(name)
    for module, own in modules.items():
        title = f"ipex.{module}" if module else "ipex"
        title = title.replace("ipex.torch_ipex", "torch.ops.torch_ipex")
        lines += [f"**`{title}`**", "", "| name | | note |", "|---|---|---|"]
        for (is_served, note), group in groupby(own, lambda name: (bool(name.home), name.note)):
            found = ", ".join(f"`{name.path.rpartition('.')[2]}`" for name in group)
            answer = "served" if is_served else "our way"
            lines.append(f"| {found} | {answer} | {_code(note)} |")
        lines.append("")
    return "\n".join(lines).rstrip()


_DOTTED = re.compile(
    r"(?<![\w./])(?:\w+ ?= ?)?"
    r"(?:oxytorch|torch|torchvision|torchaudio|llm|model)\.\w+(?:\.\w+)*"
    r"(?:\((?:[^()]|\([^()]*\))*\))?"
    r"|\b\w+=(?:True|\[\.\.\.\]|\.\.\.|'\w+')"
)


def _code(note: str) -> str:
    """A note with its calls and dotted names as code, and pages as links."""
    parts = note.split("`")
    parts[::2] = [_DOTTED.sub(lambda found: f"`{found[0]}`", part) for part in parts[::2]]
    text = "".join(f"`{part}`" if index % 2 else part for index, part in enumerate(parts))
    return re.sub(r"\(docs/(\w+)\.md\)", r"([\1](\1.md))", text)


def arguments(ways: dict[str, str]) -> Callable[[], str]:
    """Makes a table of a function's arguments and what they are in oxytorch's own."""
    return lambda: "\n".join(
        ["| there | in oxytorch |", "|---|---|"]
        + [f"| `{name}` | {_code(way)} |" for name, way in ways.items()]
    )


def options() -> str:
    """The launcher's options."""
    rows = [f"| `{name}` | {_option(meaning)} |" for name, meaning in meanings().items()]
    older = ", ".join(f"`{old}`" for old in SPELLINGS if old != "-m")
    return "\n".join(
        ["| `ipexrun` | `oxytorch run` |", "|---|---|", *rows, "",
         f"Older spellings are taken too: {older}, and `_` for `-`."]
    )  # fmt: skip


def _option(meaning: str) -> str:
    return (
        f"`{meaning}`"
        if meaning.startswith("--")
        else meaning.replace("--optimize", "`--optimize`")
    )


TABLES: dict[str, Callable[[], str]] = {
    "names": names,
    "optimize": arguments(predecessor.OPTIMIZE),
    "llm.optimize": arguments(predecessor.LLM_OPTIMIZE),
    "ipexrun": options,
}


def written(page: str) -> str:
    """The page with its tables as they are now."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name} begin -->\n", f"<!-- {name} end -->"
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}{table()}\n{end}{rest.partition(end)[2]}"
    return page


if __name__ == "__main__":
    TARGET.write_text(written(TARGET.read_text()))
