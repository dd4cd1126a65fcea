"""Collect the demo's text: descriptions of Python's standard library, one a line.

Run with CPython 3.13; the result is checked in as ``src/oxytorch/demo/data/python_library.txt``:

    python3.13 tools/collect_demo_text.py > src/oxytorch/demo/data/python_library.txt

Each line is ``name: description``. The description is the running text at the start of the
object's docstring; docstrings that are mostly signatures or examples are left out.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator

MODULES = """
builtins os os.path shutil pathlib tempfile glob fnmatch io itertools functools operator collections
contextlib json csv re string textwrap difflib datetime calendar time random statistics math cmath
fractions hashlib hmac secrets base64 binascii zlib gzip bz2 lzma zipfile tarfile pickle copy shelve
sqlite3 subprocess threading multiprocessing queue sched socket ssl urllib.parse urllib.request
http.client http.server smtplib email.utils imaplib ftplib asyncio argparse logging getpass platform
locale gettext unicodedata struct array bisect heapq enum dataclasses types inspect dis traceback
linecache pdb timeit tracemalloc gc weakref warnings signal mmap select html xml.etree.ElementTree
configparser tomllib webbrowser uuid ipaddress colorsys wave doctest unittest venv pkgutil importlib
importlib.metadata runpy sys sysconfig site tokenize concurrent.futures contextvars graphlib numbers
fileinput filecmp stat mailbox mimetypes code pprint reprlib shlex cmd
"""
WITH_METHODS = {"builtins", "pathlib", "datetime", "collections", "tarfile", "zipfile", "threading"}
WITHOUT_METHODS = {bytearray, bytes}  # they repeat those of str
WORDS = range(12, 71)
MOST_PER_MODULE = 8
NOT_PROSE = re.compile(r"[{}<>|=`\\*]|->|--|\(\)|\.\. |[Dd]eprecated")


def members(module_name: str) -> Iterator[tuple[str, object]]:
    module = importlib.import_module(module_name)
    prefix = "" if module_name == "builtins" else f"{module_name}."
    names = getattr(module, "__all__", None) or vars(module)
    for name in sorted(names):
        value = getattr(module, name, None)
        if name.startswith("_") or not callable(value):
            continue
        yield prefix + name, value
        if module_name in WITH_METHODS and isinstance(value, type) and value not in WITHOUT_METHODS:
            for method, function in sorted(vars(value).items()):
                if callable(function) and not method.startswith("_"):
                    yield f"{prefix}{name}.{method}", function


def description(value: object) -> str:
    """The running text at the start of the docstring, or an empty string."""
    own = vars(value).get("__doc__") if isinstance(value, type) else inspect.getdoc(value)
    if not isinstance(own, str):
        return ""
    text = ""
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(own))[:3]:
        line = " ".join(paragraph.split())
        if not (re.match(r"[A-Z][a-z]* ", line) and line.endswith(".")) or NOT_PROSE.search(line):
            if text:
                break
            continue
        text = f"{text} {line}".strip()
        if len(text.split()) >= 25:
            break
    return text


def main() -> None:
    seen: set[str] = set()
    for module_name in MODULES.split():
        lines = []
        for name, value in members(module_name):
            text = description(value)
            if text not in seen and len(text.split()) in WORDS:
                seen.add(text)
                lines.append(f"{name}: {text}")
        most = MOST_PER_MODULE * (3 if module_name in {"builtins", "os"} else 1)
        step = max(1, -(-len(lines) // most))
        for line in lines[::step]:
            print(line)


if __name__ == "__main__":
    main()
