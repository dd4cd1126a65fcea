"""Hooks that a model's own library puts on its modules are part of its code; a user's are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxytorch
from oxytorch.program.replay import Replay


def _of(library: str, thing: Any) -> Any:
    """A function or class as if a module of a library had defined it."""
    thing.__module__ = f"{library}.parts"
    return thing


def _layer(library: str = "somelib") -> type[nn.Module]:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).relu()

    return _of(library, Layer)  # type: ignore[no-any-return]


def _doubled() -> Callable[..., Tensor]:
    def hook(module: nn.Module, given: Any, found: Tensor) -> Tensor:
        return found * 2.0

    return hook


def _model(library: str = "somelib") -> nn.Sequential:
    layer = _layer(library)
    return nn.Sequential(layer(), layer()).eval()


def _optimized(model: nn.Module) -> tuple[nn.Module, Replay]:
    fast = oxytorch.optimize(model, graph=True, passes=["program"])
    return fast, fast.__dict__["forward"]


def _called(model: nn.Module, x: Tensor, times: int = 4) -> Tensor:
    with torch.no_grad():
        for _ in range(times):
            found = model(x)
    return found  # type: ignore[no-any-return]


def test_a_librarys_own_hooks_are_recorded() -> None:
    model, x = _model(), torch.randn(3, 16)
    model[0].register_forward_hook(_of("somelib", _doubled()))
    model[1].register_forward_pre_hook(_of("somelib", lambda module, given: (given[0] - 1.0,)))
    fast, replay = _optimized(model)
    torch.testing.assert_close(_called(fast, x), _called(model, x))
    assert len(replay.programs()) == 1 and replay._patience.served >= 2


@pytest.mark.parametrize(
    ("library", "hook"), [("somelib", "other"), ("__main__", "__main__"), ("torch", "torch")]
)
def test_hooks_of_others_run_with_the_models_own_code(library: str, hook: str) -> None:
    model, x = _model(library), torch.randn(3, 16)
    seen: list[Tensor] = []
    model[0].register_forward_hook(_of(hook, lambda module, given, found: seen.append(found)))
    fast = oxytorch.optimize(model, graph=True)
    _called(fast, x)
    assert len(seen) == 4
    assert "a module has a hook" in str(oxytorch.explain(fast))


def test_objects_are_hooks_of_users() -> None:
    class Hook:
        calls = 0

        def __call__(self, module: nn.Module, given: Any, found: Tensor) -> None:
            self.calls += 1

    _of("somelib", Hook)
    fast, hook = oxytorch.optimize(_model(), graph=True), Hook()
    fast[0].register_forward_hook(hook)  # type: ignore[index]
    _called(fast, torch.randn(3, 16))
    assert hook.calls == 4


def test_a_librarys_hook_that_keeps_a_state_is_called() -> None:
    model, x = _model(), torch.randn(3, 16)
    seen: list[Tensor] = []
    model[0].register_forward_hook(_of("somelib", lambda module, given, found: seen.append(found)))
    fast, replay = _optimized(model)
    _called(fast, x, 6)
    assert len(seen) == 6 and not replay.programs()


def test_hooks_that_come_and_go_are_followed() -> None:
    model, x = _model(), torch.randn(3, 16)
    fast, replay = _optimized(model)
    plain = _called(fast, x)
    assert replay.programs()
    own = fast[0].register_forward_hook(_of("somelib", _doubled()))  # type: ignore[index]
    stock = model[0].register_forward_hook(_doubled())
    torch.testing.assert_close(_called(fast, x), _called(model, x))
    assert replay.programs()
    users: list[Tensor] = []
    handle = fast[1].register_forward_hook(  # type: ignore[index]
        lambda module, given, found: users.append(found)
    )
    torch.testing.assert_close(_called(fast, x), _called(model, x))
    assert len(users) == 4
    for each in (own, stock, handle):
        each.remove()
    torch.testing.assert_close(_called(fast, x), plain)
    assert replay.programs() and len(users) == 4


def test_collected_hidden_states_of_transformers() -> None:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    config = SegformerConfig(
        depths=[1, 1], hidden_sizes=[16, 32], num_attention_heads=[1, 2], num_encoder_blocks=2,
        sr_ratios=[2, 1], mlp_ratios=[2, 2], patch_sizes=[7, 3], strides=[4, 2],
        decoder_hidden_size=32, num_labels=5,
    )  # fmt: skip
    model = SegformerForSemanticSegmentation(config).eval()
    x = torch.randn(1, 3, 64, 64)
    fast, replay = _optimized(model)
    with torch.no_grad():
        expected = model(x, output_hidden_states=True)
        for _ in range(5):
            logits = fast(x).logits
            found = fast(x, output_hidden_states=True)
    assert len(replay.programs()) == 2, oxytorch.explain(fast).calls
    torch.testing.assert_close(logits, expected.logits)
    torch.testing.assert_close(found.hidden_states, expected.hidden_states)
