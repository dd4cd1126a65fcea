"""What the zoo asks of one model, optimized in one way in one dtype, beside the stock model."""

from __future__ import annotations

import copy
import functools
import pickle
import re
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from architectures import ARCHITECTURES
from building import Build, Case
from forms import Leaves, difference_in_form, relative_error, tensors_of
from networks import NETWORKS
from torch import nn
from torch.utils import _pytree as pytree

import oxytorch
from oxytorch.core.watched import WatchedParameter
from oxytorch.graph.errors import DtypeError
from oxytorch.optimize import PASSES

CASES: dict[str, Build] = {**ARCHITECTURES, **NETWORKS}
WAYS = ("default", "sample_input", "all_passes", "graph", "tune")
DTYPES = ("float32", "bfloat16")
COMBINATIONS = tuple((way, dtype) for way in WAYS for dtype in DTYPES)

FLOAT32_LIMIT = 1e-5
"""Of the largest value of each output; or twice stock's own error, against float64."""
BFLOAT16_FLOOR = 2**-7
"""Two roundings of a result to bfloat16, of the largest value: allowed however exact stock is."""


DRAWS = 4
"""Further inputs that are drawn where a bfloat16 error is too large: was it chance?"""
WAIT = 90.0
"""Seconds that no call of these models may take, with another test on the same cores: the call that
makes a program of two sizes times kernels, which takes 6 seconds alone and up to 46 beside a test
that does the same."""


@dataclass(frozen=True)
class Finding:
    """A claim that does not hold, and how."""

    claim: str
    message: str


class Stock:
    """A model, its answers to both inputs, and how exact stock itself is."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._untouched = copy.deepcopy(case.model)
        self._run_in_bfloat16: Callable[[list[Any]], list[Any]] = self._converted
        self.answers = [call(case.model, inputs) for inputs in (case.first, case.second)]
        self.expected = [tensors_of(answer) for answer in self.answers]

    @functools.cached_property
    def bfloat16(self) -> dict[str, float] | str:
        """Largest relative error of each output in stock bfloat16; the reason if it cannot run."""
        reasons = []
        for way, run in (("bfloat16()", self._converted), ("autocast", self._autocast)):
            try:
                errors = _errors(run([self.case.first, self.case.second]), self.expected)
            except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
                reasons.append(f"{way}: {_text(error)}")
            else:
                self._run_in_bfloat16 = run
                return errors
        return f"stock has no bfloat16: {'; '.join(reasons)}"

    @functools.cached_property
    def further(self) -> list[tuple[Any, Leaves, dict[str, float]]]:
        """More inputs like the first, with stock's answers and its bfloat16 errors."""
        found = []
        for seed in range(DRAWS):
            torch.manual_seed(100 + seed)
            inputs = self.case.draw(0)
            expected = tensors_of(call(self._untouched, inputs))
            try:
                errors = _errors(self._run_in_bfloat16([inputs]), [expected])
            except ValueError:  # an output of another length, say: no yardstick
                continue
            found.append((inputs, expected, errors))
        return found

    @functools.cached_property
    def rounding(self) -> dict[str, float]:
        """Largest relative error of each output in stock float32, where float64 can run."""
        try:
            inputs = [self.case.first, self.case.second]
            wide = [tensors_of(answer) for answer in self._converted(inputs, torch.float64)]
            return _errors(self.answers, wide)
        except (RuntimeError, ValueError, TypeError, NotImplementedError, KeyError):
            return {}  # what stock cannot compute in float64 has the usual limit

    @functools.cached_property
    def cast_fails(self) -> str:
        """Why stock's `.bfloat16()` of the model that is optimized, which has been called, does not
        run; empty where it does."""
        try:
            model = copy.deepcopy(self.case.model).to(torch.bfloat16)
            for given in (self.case.first, self.case.second):
                call(model, _converted(given, torch.bfloat16))
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            return _text(error)
        return ""

    def _converted(self, inputs: list[Any], dtype: torch.dtype = torch.bfloat16) -> list[Any]:
        model = copy.deepcopy(self._untouched).to(dtype)
        return [call(model, _converted(given, dtype)) for given in inputs]

    def _autocast(self, inputs: list[Any]) -> list[Any]:
        """Under autocast, with what modules return rounded as a converted model's values are.

        Autocast alone keeps sums between layers in float32, which is more than bfloat16 can do.
        """
        model = copy.deepcopy(self._untouched)
        for module in model.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                module.register_forward_hook(
                    lambda _, __, result: pytree.tree_map(_rounded, result)
                )
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return [call(model, given) for given in inputs]


def _rounded(value: Any) -> Any:
    """The same value, with no more digits than bfloat16 has where it is a float32 tensor."""
    if isinstance(value, torch.Tensor) and value.dtype == torch.float32:
        return value.to(torch.bfloat16).to(torch.float32)
    return value


def call(model: nn.Module, inputs: Any) -> Any:
    """Run a model on inputs of its own, from the same random state each time."""
    inputs = copy.deepcopy(inputs)
    torch.manual_seed(1)
    with torch.no_grad():
        return model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)


@functools.lru_cache(maxsize=1)
def stock(name: str) -> Stock:
    """Build a model and run it as torch does."""
    return Stock(CASES[name]())


def _converted(inputs: Any, dtype: torch.dtype) -> Any:
    """The same inputs with another dtype in place of float32."""
    if isinstance(inputs, torch.Tensor):
        return inputs.to(dtype) if inputs.is_floating_point() else inputs
    if isinstance(inputs, Mapping):
        return {key: _converted(value, dtype) for key, value in inputs.items()}
    if isinstance(inputs, (tuple, list)):
        return type(inputs)(_converted(value, dtype) for value in inputs)
    return inputs


def _errors(answers: list[Any], expected: list[Leaves]) -> dict[str, float]:
    """Relative errors over both inputs; ValueError where they are no numbers."""
    errors: dict[str, float] = {}
    for answer, leaves in zip(answers, expected, strict=True):
        found = tensors_of(answer)
        if found.keys() != leaves.keys():
            raise ValueError("outputs of another form")
        for path, leaf in leaves.items():
            if leaf.is_floating_point():
                error = relative_error(found[path], leaf)
                if not error < float("inf"):
                    raise ValueError("answers that are not finite")
                errors[path] = max(error, errors.get(path, 0.0))
    return errors


def options(way: str, dtype: str, case: Case) -> dict[str, Any]:
    """The arguments of `optimize` for a way and a dtype."""
    given: dict[str, Any] = {} if way == "default" else {"sample_input": case.first}
    if way == "all_passes":
        given["passes"] = [name for name in PASSES if name != "program"]
    if way == "graph":
        given["graph"] = True
    if way == "tune":
        given["tune"] = True
    if dtype == "bfloat16":
        given["dtype"] = torch.bfloat16
    return given


@dataclass
class Outcome:
    """What the checks of one combination gave."""

    findings: list[Finding] = field(default_factory=list)
    skipped: str = ""
    """Why there was nothing to check."""
    changed: int = 0
    """Modules that were changed."""

    @property
    def text(self) -> str:
        return "\n".join(f"{found.claim}: {found.message}" for found in self.findings)


def check(name: str, way: str, dtype: str) -> Outcome:
    """Optimize a model of the zoo in one way and return every claim that does not hold."""
    known = stock(name)
    if dtype == "bfloat16" and isinstance(known.bfloat16, str):
        return Outcome(skipped=known.bfloat16)
    outcome = Outcome()

    def claim(what: str, test: Callable[[], Iterator[str]]) -> None:
        try:
            outcome.findings += [Finding(what, message) for message in test()]
        except Exception as error:  # whatever is raised is what the zoo looks for
            outcome.findings.append(Finding(what, _text(error)))
            if isinstance(error, DtypeError):
                refused.append(_text(error.__cause__ or error))

    refused: list[str] = []
    try:
        torch.manual_seed(1)
        model = oxytorch.optimize(known.case.model, **options(way, dtype, known.case))
    except Exception as error:
        outcome.findings.append(Finding("optimize", _text(error)))
        return outcome
    claim("answers", lambda: _answers(model, known, dtype, 0))
    claim("answers again", lambda: _answers(model, known, dtype, 0))
    claim("second shape", lambda: _answers(model, known, dtype, 1))
    claim("second shape again", lambda: _answers(model, known, dtype, 1))
    claim("first shape after the second", lambda: _answers(model, known, dtype, 0))
    claim("second thread", lambda: _in_a_thread(lambda: _answers(model, known, dtype, 0)))
    claim("pickle", lambda: _pickled(model, known, dtype))
    claim("original", lambda: _answers(known.case.model, known, "float32", 0))
    changed = changed_modules(known.case.model, model)
    outcome.changed = len(changed)
    claim("explain", lambda: _explained(model, changed))
    if refused and len(refused) == len(outcome.findings) and known.cast_fails:
        return Outcome(skipped=f"refused: {refused[0]}; stock's .bfloat16(): {known.cast_fails}")
    return outcome


def _answers(model: nn.Module, known: Stock, dtype: str, which: int) -> Iterator[str]:
    """Compare a model's answer to one input with stock's: class, keys and values."""
    inputs = (known.case.first, known.case.second)[which]
    began = time.perf_counter()
    answer = call(model, inputs)
    waited = time.perf_counter() - began
    if waited > WAIT:
        yield f"waiting: the call took {waited:.0f} s"
    form = difference_in_form(known.answers[which], answer, dtypes=dtype == "float32")
    if form is not None:
        yield f"form: {form}"
        return
    found = tensors_of(answer)
    for path, leaf in known.expected[which].items():
        if dtype == "bfloat16" and not leaf.is_floating_point():
            continue
        error = relative_error(found[path], leaf)
        if dtype == "float32":
            allowed = FLOAT32_LIMIT
            if error > allowed:
                # Twice stock's own error, on the other side of the exact value.
                allowed = max(allowed, 3 * known.rounding.get(path, 0.0))
        else:
            assert isinstance(known.bfloat16, dict)
            allowed = _allowed_in_bfloat16(known.bfloat16, path)
            if error > allowed and known.further:
                error, allowed = _typical(model, known, path)
        if not error <= allowed:
            yield f"values: {path or 'output'} differs by {error:.1e}, allowed {allowed:.1e}"


def _allowed_in_bfloat16(errors: Mapping[str, float], path: str) -> float:
    """Twice stock's error in an output, or in its middle output where that is larger."""
    middle = statistics.median(errors.values())
    return max(2 * errors.get(path, 0.0), 2 * middle, BFLOAT16_FLOOR)


def _typical(model: nn.Module, known: Stock, path: str) -> tuple[float, float]:
    """An output's error and what is allowed, both the median over further inputs.

    The largest of few values is chance, and so is which of two equally good experts or boxes a
    rounded score chooses.
    """
    errors, limits = [], []
    for inputs, expected, stock_errors in known.further:
        leaf = tensors_of(call(model, inputs))[path]
        errors.append(relative_error(leaf, expected[path]))
        limits.append(_allowed_in_bfloat16(stock_errors, path))
    return statistics.median(errors), statistics.median(limits)


def _in_a_thread(test: Callable[[], Iterator[str]]) -> Iterator[str]:
    messages: list[str] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            messages.extend(test())
        except BaseException as error:  # raised again where the claim is made
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    yield from messages


def _pickled(model: nn.Module, known: Stock, dtype: str) -> Iterator[str]:
    try:
        pickle.dumps(known.case.model)
    except Exception:  # what stock cannot do is not asked of the optimized model
        return
    yield from _answers(pickle.loads(pickle.dumps(model)), known, dtype, 0)


def changed_modules(original: nn.Module, optimized: nn.Module) -> dict[str, str]:
    """Paths of modules that differ from the original's, with what differs."""
    theirs = dict(original.named_modules())
    changed = {}
    for path, module in optimized.named_modules():
        if path not in theirs:
            changed[path] = "new"
            continue
        reason = _difference(theirs[path], module)
        if reason:
            changed[path] = reason
    for path in theirs.keys() - dict(optimized.named_modules()).keys():
        changed[path] = "gone"
    return changed


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _difference(original: nn.Module, module: nn.Module) -> str:
    if type(original) is not type(module):
        return f"class {type(module).__name__}"
    if ("forward" in original.__dict__) != ("forward" in module.__dict__):
        return "its own forward"
    for kind in _HOOKS:
        if len(getattr(original, kind)) != len(getattr(module, kind)):
            return kind
    for name, parameter in original._parameters.items():
        other = module._parameters.get(name)
        if (parameter is None) != (other is None):
            return f"{name} removed or added"
        if parameter is None or other is None:
            continue
        # One whose writes are counted is a plain one in all other ways.
        if type(other) not in (type(parameter), WatchedParameter):
            return f"{name} is a {type(other).__name__}"
        if parameter.dtype != other.dtype or parameter.stride() != other.stride():
            return f"{name} of another dtype or layout"
    return ""


_FAILS = re.compile(
    r"fails(,|:) (Key|Index|Attribute|Type|Name|Assertion|UnboundLocal)Error"
    "|made without the pass"
)
"""Errors of ours, not of a model that cannot run in a dtype."""


def _explained(model: nn.Module, changed: dict[str, str]) -> Iterator[str]:
    """Every changed module has to be named as done, by itself or by a part of it; and no program
    may be missing because of an error of ours."""
    report = oxytorch.explain(model)
    if not str(report).strip():
        yield "the report is empty"
    named = {entry.module for entry in report.applied}
    for path, reason in changed.items():
        inside = path + "." if path else ""
        if path not in named and not any(name.startswith(inside) for name in named):
            yield f"does not name a changed {_kind(model, path)} ({reason}), such as {path}"
            break
    whys = [*report.calls, *(entry.detail for entry in report.entries if not entry.applied)]
    for why in whys:
        if _FAILS.search(why):
            yield f"no program, or one without a pass: {why}"
            return


def _kind(model: nn.Module, path: str) -> str:
    return type(dict(model.named_modules()).get(path)).__name__


def _text(error: BaseException) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
