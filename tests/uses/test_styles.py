"""Models in all styles of code: answers, types, changed state, gradients, and calls that differ."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from . import styles
from .compare import Log
from .named import FORMS
from .styles import STYLES

SAMPLED = [pytest.param("default", marks=pytest.mark.slow), "sample"]


def _sample() -> torch.Tensor:
    return torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(5))


def _seeded() -> None:
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    styles.CALLS.clear()


def _fresh(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        _seeded()
        for value in (styles.STYLES[name]().forward.__defaults__ or ())[:1]:
            if isinstance(value, list):
                value.clear()
        return STYLES[name]()

    return build


def _state(model: Any) -> list[Any]:
    return [model.calls, model.last, model.history, len(model.cache), model.state_dict()]


def _forget(model: Any) -> None:
    """Bring the state of the model back to what it was before any call."""
    model.calls, model.last = 0, None
    model.history.clear()
    model.cache.clear()
    model.counter.zero_()
    model.mean = torch.zeros(12)
    styles.CALLS.clear()
    for value in (type(model).forward.__defaults__ or ())[:1]:
        if isinstance(value, list):
            value.clear()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [*STYLES])
def test_style(
    check: Callable[..., None], name: str, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def use(model: Any, log: Log) -> None:
        _forget(model)
        _seeded()
        capsys.readouterr()
        for x in (_sample(), _sample(), _sample() * 3, _sample()[:1], _sample()[:, :2] + 1):
            with torch.no_grad():
                log(model(x), x)
        log(_state(model))
        if form != "program":  # docs/graph.md: what Python does beside computing is not repeated
            log(capsys.readouterr().out)

    check(_fresh(name), use, form, _sample)


@pytest.mark.parametrize("form", SAMPLED)
@pytest.mark.parametrize("name", [*STYLES])
def test_style_with_gradients(check: Callable[..., None], name: str, form: str) -> None:
    def use(model: Any, log: Log) -> None:
        _forget(model)
        _seeded()
        for _ in range(2):
            x = _sample().requires_grad_()
            result = model(x * 1)
            log(result)
            total = _total(result)
            if total is not None:
                total.backward()
            log(x.grad, [p.grad for p in model.parameters()])

    check(_fresh(name), use, form, _sample, tolerance=2e-5)


def _total(value: Any) -> torch.Tensor | None:
    """Return the sum of all differentiable tensors in a structure."""
    if isinstance(value, torch.Tensor):
        return value.sum() if value.requires_grad else None
    if hasattr(value, "logits"):
        value = [value.logits]
    if isinstance(value, dict):
        value = [*value.values()]
    if not isinstance(value, (list, tuple)):
        return None
    parts = [part for part in map(_total, value) if part is not None]
    return sum(parts[1:], parts[0]) if parts else None


class Whole(nn.Module):
    """A style as one part of a larger model, called twice."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part, self.first = part, nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> Any:
        h = torch.relu(self.first(x))
        first = self.part(h)
        return h, first, self.part(torch.tanh(h))


@pytest.mark.parametrize("form", [*SAMPLED, "program"])
@pytest.mark.parametrize("name", [*STYLES])
def test_style_as_a_part(check: Callable[..., None], name: str, form: str) -> None:
    def use(model: Any, log: Log) -> None:
        _forget(model.part)
        _seeded()
        for x in (_sample(), _sample(), _sample() * 2, _sample()[:, :3]):
            with torch.no_grad():
                log(model(x), x)
        log(_state(model.part))

    check(lambda: Whole(_fresh(name)()).eval(), use, form, _sample)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["reads_a_global", "reads_an_attribute", "branch_on_flag"])
def test_python_state_changed_between_calls(
    check: Callable[..., None], name: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def use(model: Any, log: Log) -> None:
        x = _sample()
        with torch.no_grad():
            log(model(x), model(x), model(x))
            monkeypatch.setattr(styles, "GLOBAL_SCALE", 0.25)
            model.scale, model.flag = 0.125, False
            log(model(x), model(x))
            monkeypatch.setattr(styles, "GLOBAL_SCALE", 1.0)
            model.scale, model.flag = 0.5, True
            log(model(x))

    check(_fresh(name), use, form, _sample)


CALLS: dict[str, tuple[str, Callable[[Any, torch.Tensor], Any]]] = {
    "keyword": ("plain", lambda m, x: m(x=x)),
    "keyword_of_this": ("not_called_self", lambda m, x: m(x=x)),
    "keyword_called_self": ("first_called_input", lambda m, x: m(x)),
    "factor": ("star_args", lambda m, x: m(x, factor=5)),
    "extra_positional": ("star_args", lambda m, x: m(x, x, 3)),
    "default_given": ("defaults", lambda m, x: m(x, 0.25)),
    "default_by_name": ("defaults", lambda m, x: m(x, scale=0.25, flag=False)),
    "mask_given": ("defaults", lambda m, x: m(x, mask=x > 0)),
    "all_by_name": ("defaults", lambda m, x: m(flag=True, mask=None, scale=1.5, x=x)),
    "list_given": ("isinstance_check", lambda m, x: m([x, x])),
    "tuple_given": ("isinstance_check", lambda m, x: m((x,))),
    "dictionary_given": ("isinstance_check", lambda m, x: m({0: x})),
    "attribute_on_input": ("hasattr_checks", lambda m, x: m(_with(x, "extra", 2.0))),
    "attribute_read": ("getattr_of_input", lambda m, x: m(_with(x, "weighting", 2.0))),
    "parameter_given": ("plain", lambda m, x: m(nn.Parameter(x))),
    "subclass_given": ("exact_type_check", lambda m, x: m(x.as_subclass(Marked))),
    "too_many": ("plain", lambda m, x: m(x, x)),
    "too_few": ("plain", lambda m, x: m()),
    "unknown_keyword": ("plain", lambda m, x: m(x, y=x)),
    "wrong_size": ("plain", lambda m, x: m(x[..., :7])),
    "none_given": ("residual_norm", lambda m, x: m(None)),
    "array_given": ("residual_norm", lambda m, x: m(x.numpy())),
    "nan_given": ("raises_on_bad_values", lambda m, x: m(x * float("nan"))),
    "flat": ("match_statement", lambda m, x: m(x[0])),
    "one_dimension": ("residual_norm", lambda m, x: m(x[0, 0])),
    "four_dimensions": ("residual_norm", lambda m, x: m(x[None])),
    "transposed": ("residual_norm", lambda m, x: m(x.transpose(0, 1))),
    "expanded": ("residual_norm", lambda m, x: m(x[:1].expand(3, 5, 12))),
    "strided": ("residual_norm", lambda m, x: m(torch.cat([x, x], -1)[..., ::2])),
    "negative_view": ("residual_norm", lambda m, x: m(torch.complex(x, x).conj().imag)),
    "empty": ("residual_norm", lambda m, x: m(x[:0])),
    "double_given": ("residual_norm", lambda m, x: m(x.double())),
    "half_given": ("residual_norm", lambda m, x: m(x.half())),
    "integers_given": ("residual_norm", lambda m, x: m(x.int())),
    "complex_given": ("plain", lambda m, x: m(torch.complex(x, x))),
    "sparse_given": ("plain", lambda m, x: m(x[0].to_sparse())),
    "meta_given": ("residual_norm", lambda m, x: m(x.to("meta"))),
}


class Marked(torch.Tensor):
    """A tensor subclass of a user."""


def _with(x: torch.Tensor, name: str, value: float) -> torch.Tensor:
    x = x.clone()
    setattr(x, name, value)
    return x


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [*CALLS])
def test_call(check: Callable[..., None], name: str, form: str) -> None:
    """Calls of another form than the sample's, between calls of the sample's form."""
    style, call = CALLS[name]

    def use(model: Any, log: Log) -> None:
        x = _sample()
        with torch.no_grad():
            log(model(x), model(x))
            for _ in range(3):
                try:
                    log(call(model, x))
                except Exception as error:
                    log(error)
            log(model(x))

    check(_fresh(style), use, form, _sample)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["branch_on_shape", "residual_norm", "device_and_dtype"])
def test_many_shapes(check: Callable[..., None], name: str, form: str) -> None:
    def use(model: Any, log: Log) -> None:
        with torch.no_grad():
            for repeat in range(2):
                for rows in range(1, 24):
                    log(model(torch.cat([_sample()] * 12)[:rows, : 1 + rows % 5] * (repeat + 1)))

    check(_fresh(name), use, form, _sample)
