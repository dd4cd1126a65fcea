"""Checks the text of a program from a file before the library reads it.

Every step is compared with the schema of its operator, so that what runs is what torch would run
if it was called from Python with these arguments. What an operator may be is a rule:

- it is torch's own (`aten`) or this package's, and takes and returns what a program passes,
- it returns tensors, and writes to none; only an activation may write to what a step has made,
- it takes text beside a tensor only, where text names a mode (`from_file` takes a path),
- it makes dense tensors on the CPU: none of other layouts, of other devices, or resized,
- it is public, or one of the few with an underscore into which models are exported,
- torch checks its arguments, or trusted.h does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from . import allowed
from .words import target_of

_OTHER_TENSORS = re.compile(
    "|".join(
        (
            *allowed.OTHER_PARTS,
            *(f"^{begin}" for begin in allowed.OTHER_BEGINS),
            *(f"^{name}$" for name in allowed.OTHER_NAMES),
        )
    )
)

_WORDS: dict[str, frozenset[str]] = {
    "ScalarTypeType": frozenset(f"={name}" for name in allowed.DTYPES),
    "LayoutType": frozenset(("=strided",)),
    "MemoryFormatType": frozenset(f"={name}" for name in allowed.FORMATS),
    "DeviceObjType": frozenset(("cpu",)),
    "BoolType": frozenset(("true", "false")),
}
_KINDS = frozenset(
    ("TensorType", "IntType", "SymIntType", "FloatType", "StringType", "OptionalType", "ListType")
) | frozenset(_WORDS)
_INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,18})")
_FLOAT = re.compile(r"-?(inf|[0-9]+(\.[0-9]+)?(e[+-]?[0-9]+)?)|nan")
_TEXT = re.compile(r'"[A-Za-z_][A-Za-z0-9_]*"')
_VALUE = re.compile(r"[%$](0|[1-9][0-9]{0,6})")
_DEEPEST = 8
_OURS = re.compile(" = oxytorch::")
_AGAIN = "; if another version of oxytorch saved the file, save it again with this one"
"""Operators of ours may take other arguments in another version; those of torch keep theirs."""


@dataclass(frozen=True)
class Counts:
    """How many tensors and sizes a program takes and returns, and its constants."""

    tensors: int
    sizes: int
    constants: int
    tensor_results: int
    size_results: int


def check(text: str) -> Counts:
    """Check a program. Raises ValueError, which names the line, if it is none or may not run."""
    lines = text.split("\n")
    first = lines[0].split(" ")
    if len(first) != 4 or first[0] != "inputs" or not all(map(_is_count, first[1:])):
        raise ValueError(f"line 1: expected inputs and three numbers, got {_shown(lines[0])}")
    tensors, sizes, constants = map(int, first[1:])
    steps = _Checker(tensors + constants, sizes)
    end = len(lines)  # of the line of outputs, which the plan follows
    while end > 2 and lines[end - 1].startswith("place "):
        end -= 1
    for number, line in enumerate((*lines[1 : end - 1], *lines[end:]), 2):
        try:
            if number < end:
                steps.check(line.split(" "))
            else:
                steps.place(line.split(" "))
        except ValueError as error:
            shown = number + (number >= end)
            remedy = _AGAIN if _OURS.search(line) else ""
            raise ValueError(f"line {shown}, {_shown(line)}: {error}{remedy}") from error
    found = steps.outputs(lines[end - 1].split(" "), end)
    return Counts(tensors, sizes, constants, *found)


def _is_count(word: str) -> bool:
    return _VALUE.fullmatch(f"%{word}") is not None


def _shown(line: str) -> str:
    return repr(line if len(line) <= 120 else line[:117] + "...")


class _Words:
    """The words of a line, one after the other."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words: Iterator[str] = iter(words)

    def next(self) -> str:
        """The next word. Raises ValueError at the end of the line."""
        word = next(self._words, "")
        if not word:
            raise ValueError("it ends too early, or has two spaces in a row")
        return word

    def check_end(self) -> None:
        """Raise ValueError if a word is left."""
        for word in self._words:
            raise ValueError(f"expected no more arguments, got {word}")


class _Checker:
    def __init__(self, tensors: int, sizes: int) -> None:
        self._known = {"%": tensors, "$": sizes}
        self._extents: set[str] = set()
        self._first_made = tensors

    def outputs(self, words: Sequence[str], number: int) -> tuple[int, int]:
        """Check the last line; return how many tensors and sizes it names."""
        if words[0] != "outputs":
            raise ValueError(f"line {number}: expected outputs, got {_shown(' '.join(words))}")
        for word in words[1:]:
            if _VALUE.fullmatch(word) is None or not self._is_known(word):
                raise ValueError(f"line {number}: expected values that exist, got {word[:50]}")
        return tuple(sum(w[0] == sigil for w in words[1:]) for sigil in "%$")  # type: ignore[return-value]

    def place(self, words: Sequence[str]) -> None:
        """Check a line of the plan, whose meaning the library checks."""
        if len(words) != 4:
            raise ValueError("expected place, a value, a buffer and its bytes")
        self._tensor(words[1])
        if not _is_count(words[2]):
            raise ValueError(f"expected the number of a buffer, got {words[2][:50]}")

    def check(self, all_words: Sequence[str]) -> None:
        """Check a step, and note its results."""
        if "=" not in all_words:
            raise ValueError("expected results = operator and arguments")
        place = all_words.index("=")
        results, words = all_words[:place], _Words(all_words[place + 1 :])
        target = words.next()
        if "::" in target:
            operator = _operator(target)
            if operator.writes and not self._is_made(*all_words[place + 2 : place + 3]):
                raise ValueError(f"expected {target} of a tensor that a step has made")
            for name, kind in operator.arguments:
                try:
                    self._argument(words.next(), words, kind)
                except ValueError as error:
                    raise ValueError(f"argument {name}: {error}") from error
            self._check_results(results, operator)
        else:
            self._own_step(target, words, results)
        words.check_end()
        for word in results:
            if word[0] in self._known:
                self._make(word)

    def _check_results(self, results: Sequence[str], operator: _Operator) -> None:
        if operator.returns_list:
            if len(results) < 2 or (results[0], results[-1]) != ("[", "]"):
                raise ValueError(f"expected the results of {operator.name} in [ ]")
            results = results[1:-1]
        elif len(results) != operator.results:
            raise ValueError(
                f"expected {operator.results} results of {operator.name}, got {len(results)}"
            )
        for word in results:
            if word != "_" and (not word.startswith("%") or _VALUE.fullmatch(word) is None):
                raise ValueError(f"expected a tensor as result, got {word[:50]}")

    def _own_step(self, target: str, words: _Words, results: Sequence[str]) -> None:
        sigil = "%" if target in ("add", "resample") else "$"
        if len(results) != 1 or _VALUE.fullmatch(results[0]) is None or results[0][0] != sigil:
            raise ValueError(f"expected one result {sigil}, got {' '.join(results)[:50]}")
        if target == "add":
            self._tensor(words.next())
            self._tensor(words.next())
            _check_word(words.next(), "FloatType")
        elif target == "resample":
            self._resample(words)
        elif target == "size":
            self._tensor(words.next())
            _check_word(words.next(), "IntType")
            self._extents.add(results[0])
        elif len(target) == 1 and target in "+-*/%<>":
            self._size(words.next())
            second = words.next()
            self._size(second)
            # Others may be -1, by which the processor cannot divide the least integer.
            if target in "/%" and second not in self._extents and not second.isdigit():
                raise ValueError(
                    f"expected to divide by a tensor's size or a constant above 0, got {second}"
                )
        else:
            raise ValueError(f"expected an operator, got {target[:50]!r}")

    def _resample(self, words: _Words) -> None:
        self._tensor(words.next())
        name = words.next().strip('"')
        if name not in allowed.RESAMPLED:
            raise ValueError(f"expected an operator that resamples, got {name[:50]}")
        if words.next() != "[":
            raise ValueError(f"expected the sizes of {name} in [ ]")
        for _ in range(int(name[-2])):
            self._size(words.next())
        if words.next() != "]" or words.next() not in (
            ["none"] if "nearest" in name else ["true", "false"]
        ):
            raise ValueError(
                f"expected {name[-2]} sizes of {name}, and whether corners are aligned"
            )

    def _argument(self, word: str, words: _Words, kind: Any, depth: int = 0) -> None:
        name = kind.kind()
        if depth > _DEEPEST:
            raise ValueError("it is nested too deep")
        if name == "OptionalType":
            if word == "some":
                self._argument(words.next(), words, kind.getElementType(), depth + 1)
            elif word != "none":
                raise ValueError(f"expected none or some, got {word[:50]}")
        elif name == "ListType":
            if word != "[":
                raise ValueError(f"expected a list, got {word[:50]}")
            for inner in iter(words.next, "]"):
                self._argument(inner, words, kind.getElementType(), depth + 1)
        elif name == "TensorType":
            self._tensor(word)
        elif name == "SymIntType" or (name == "IntType" and word.startswith("$")):
            self._size(word)
        else:
            _check_word(word, name)

    def _is_known(self, word: str) -> bool:
        return int(word[1:]) < self._known[word[0]]

    def _is_made(self, word: str = "") -> bool:
        is_tensor = word.startswith("%") and _VALUE.fullmatch(word) is not None
        return is_tensor and int(word[1:]) >= self._first_made

    def _tensor(self, word: str) -> None:
        if not word.startswith("%") or _VALUE.fullmatch(word) is None or not self._is_known(word):
            raise ValueError(f"expected a tensor that exists, got {word[:50]}")

    def _size(self, word: str) -> None:
        is_value = word.startswith("$") and _VALUE.fullmatch(word) is not None
        if not (self._is_known(word) if is_value else _is_integer(word)):
            raise ValueError(f"expected a size or an integer, got {word[:50]}")

    def _make(self, word: str) -> None:
        if int(word[1:]) != self._known[word[0]]:
            raise ValueError(f"expected {word[0]}{self._known[word[0]]} as the next, got {word}")
        self._known[word[0]] += 1


def _is_integer(word: str) -> bool:
    return _INTEGER.fullmatch(word) is not None and -(1 << 63) <= int(word) < 1 << 63


def _check_word(word: str, kind: str) -> None:
    """Raise ValueError if a constant is not of the kind that the schema names."""
    if kind == "IntType":
        is_right = _is_integer(word)
    elif kind == "FloatType":
        is_right = _FLOAT.fullmatch(word) is not None and not _INTEGER.fullmatch(word)
    elif kind == "StringType":
        is_right = _TEXT.fullmatch(word) is not None
    else:
        is_right = word in _WORDS[kind]
    if not is_right:
        raise ValueError(f"expected a {kind.removesuffix('Type')}, got {word[:50]}")


@dataclass(frozen=True)
class _Operator:
    name: str
    arguments: tuple[tuple[str, Any], ...]
    results: int
    returns_list: bool
    writes: bool


@cache
def _operator(target: str) -> _Operator:
    """The operator of a step. Raises ValueError if there is none or a file may not call it."""
    name, _, overload = target.partition(".")
    namespace, _, own = name.partition("::")
    try:
        if namespace not in allowed.NAMESPACES:
            raise RuntimeError
        torch._C._dispatch_find_schema_or_throw(name, overload)
        schema: Any = torch._C._get_schema(name, overload)
    except RuntimeError:
        raise ValueError(
            f"expected an operator of this torch ({torch.__version__}) or of oxytorch, got "
            f"{target[:100]!r}"
        ) from None
    arguments = tuple((each.name, each.real_type) for each in schema.arguments)
    why = _why_refused(namespace, own, schema, [_innermost(kind) for _, kind in arguments])
    if why:
        raise ValueError(f"a file may not call {target}: {why}")
    kinds = [each.type.kind() for each in schema.returns]
    return _Operator(target, arguments, len(kinds), kinds == ["ListType"], schema.is_mutable)


def _why_refused(namespace: str, own: str, schema: Any, kinds: Sequence[str]) -> str:
    returned = [_innermost(each.type) for each in schema.returns]
    lists = sum(each.type.kind() != "TensorType" for each in schema.returns)
    if {*returned} != {"TensorType"} or (lists and len(returned) > 1):
        return "it does not return tensors"
    is_written = schema.is_mutable or any(each.is_write for each in schema.arguments)
    if is_written and own not in allowed.IN_PLACE:
        return "it writes to a tensor"
    strange = {*kinds} - _KINDS
    if strange:
        return f"it takes a {min(strange).removesuffix('Type')}, which a program cannot pass"
    if "StringType" in kinds and "TensorType" not in kinds:
        return "it takes text and no tensor"
    if namespace == allowed.TORCH and _OTHER_TENSORS.search(own):
        return "it makes tensors that are not dense, or are on another device"
    if own.startswith("_") and own not in allowed.PRIVATE:
        return "it is internal to torch"
    with_overload = target_of(schema).partition("::")[2]
    if with_overload in allowed.TRUSTING or own.endswith(allowed.TRUSTING_ENDS):
        return "torch takes its arguments on trust"
    return ""


def _innermost(kind: Any) -> str:
    """The kind of what lists and optionals hold."""
    while kind.kind() in ("OptionalType", "ListType"):
        kind = kind.getElementType()
    found: str = kind.kind()
    return found
