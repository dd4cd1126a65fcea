"""Parts of a model are replaced, wrapped, switched and listened to; the model follows."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from .compare import Log
from .layers import KINDS, settled
from .named import FORMS as NAMED_FORMS
from .networks import NETWORKS

FORMS = [*NAMED_FORMS, pytest.param("join", marks=pytest.mark.slow)]


class LowRank(nn.Module):
    """LoRA around a layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.full((4, base.in_features), 0.05))
        self.b = nn.Parameter(torch.full((base.out_features, 4), 0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + F.linear(F.linear(x, self.a), self.b)


class Scaled(nn.Module):
    """A part with something around it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs) * 0.5


class OtherLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


Change = Callable[[Any], Any]
CHANGES: dict[str, tuple[str, Change]] = {}


def change(network: str) -> Callable[[Change], Change]:
    """Register a change of a network; what it returns is called to take the change back."""

    def register(function: Change) -> Change:
        CHANGES[function.__name__.strip("_")] = network, function
        return function

    return register


def _replace(model: Any, path: str, made: Callable[[Any], nn.Module]) -> Callable[[], None]:
    old = model.get_submodule(path)
    torch.manual_seed(3)
    model.set_submodule(path, made(old))
    return lambda: model.set_submodule(path, old)


def _replacement(name: str, network: str, path: str, made: Callable[[Any], Any]) -> None:
    CHANGES[name] = network, lambda model: _replace(model, path, made)


_ENCODER_LINEAR = ("query", "value", "out", "up", "down")
for _name in _ENCODER_LINEAR:
    _replacement(
        f"replaced_{_name}",
        "encoder",
        f"layers.0.{_name}",
        lambda old: nn.Linear(old.in_features, old.out_features),
    )
    _replacement(f"lora_{_name}", "encoder", f"layers.1.{_name}", LowRank)
    _replacement(
        f"other_class_{_name}",
        "encoder",
        f"layers.1.{_name}",
        lambda old: OtherLinear(old.in_features, old.out_features),
    )
_replacement("lora_head", "encoder", "head.2", LowRank)
_replacement("head_replaced", "encoder", "head", lambda old: nn.Linear(12, 3))
_replacement("head_identity", "encoder", "head", lambda old: nn.Identity())
_replacement(
    "layer_replaced", "encoder", "layers.0", lambda old: copy.deepcopy(old).requires_grad_()
)
_replacement("layer_wrapped", "encoder", "layers.1", Scaled)
_replacement("norm_replaced", "encoder", "layers.0.norm1", lambda old: nn.LayerNorm(12, eps=0.1))
_replacement("norm_wrapped", "encoder", "layers.0.norm2", Scaled)
_replacement("norm_dropped", "encoder", "layers.0.norm2", lambda old: nn.Identity())
_replacement("activation_replaced", "encoder", "layers.0.act", lambda old: nn.ReLU())
_replacement("activation_tanh", "encoder", "layers.0.act", lambda old: nn.GELU("tanh"))
_replacement("activation_wrapped", "encoder", "layers.0.act", Scaled)
_replacement("dropout_replaced", "encoder", "layers.0.drop", Scaled)
_replacement("convolution_replaced", "images", "blocks.0.conv1", lambda old: nn.Conv2d(8, 8, 1))
_replacement("convolution_wrapped", "images", "blocks.0.conv1", Scaled)
_replacement(
    "batch_norm_replaced", "images", "blocks.0.bn1", lambda old: settled(nn.BatchNorm2d(8))
)
_replacement("batch_norm_wrapped", "images", "blocks.0.bn2", Scaled)
_replacement("batch_norm_group", "images", "blocks.0.bn2", lambda old: nn.GroupNorm(2, 8))
_replacement("batch_norm_dropped", "images", "stem.1", lambda old: nn.Identity())
_replacement("relu_replaced", "images", "blocks.1.act", lambda old: nn.SiLU())
_replacement("stem_replaced", "images", "stem", lambda old: nn.Conv2d(3, 8, 1))
_replacement("pool_replaced", "images", "pool", lambda old: nn.AdaptiveMaxPool2d(1))
_replacement("classifier_replaced", "images", "fc", lambda old: nn.Linear(8, 9))
_replacement("blocks_identity", "images", "blocks", lambda old: nn.Identity())


@change("deep")
def _set_item(model: Any) -> None:
    model[0][0] = nn.Linear(12, 12)


@change("deep")
def _set_item_activation(model: Any) -> None:
    model[1][0][1] = nn.Tanh()


@change("deep")
def _append(model: Any) -> None:
    model.append(nn.Linear(12, 3))


@change("deep")
def _append_inside(model: Any) -> None:
    model[1].append(nn.Softmax(-1))


@change("deep")
def _insert(model: Any) -> None:
    model[0].insert(1, nn.Tanh())


@change("deep")
def _delete(model: Any) -> None:
    del model[1][2]


@change("deep")
def _pop(model: Any) -> None:
    model[0].pop(1)


@change("deep")
def _extend(model: Any) -> None:
    model.extend([nn.Linear(12, 12), nn.ReLU()])


@change("deep")
def _modules_dictionary(model: Any) -> None:
    model[0]._modules["0"] = nn.Linear(12, 12)


@change("deep")
def _exchanged(model: Any) -> None:
    model[0][0], model[1][1] = model[1][1], model[0][0]


@change("encoder")
def _layer_dropped(model: Any) -> None:
    del model.layers[1]


@change("encoder")
def _layers_reversed(model: Any) -> None:
    model.layers = nn.ModuleList(reversed([*model.layers]))


@change("encoder")
def _layer_twice(model: Any) -> None:
    model.layers.append(model.layers[0])


def _attribute(name: str, network: str, path: str, attribute: str, value: Any) -> None:
    def function(model: Any) -> Callable[[], None]:
        module = model.get_submodule(path)
        old = getattr(module, attribute)
        setattr(module, attribute, value)
        return lambda: setattr(module, attribute, old)

    CHANGES[name] = network, function


_attribute("norm_eps", "encoder", "layers.0.norm1", "eps", 0.5)
_attribute("own_norm_eps", "encoder", "layers.0.norm2", "eps", 0.5)
_attribute("gelu_tanh", "encoder", "layers.0.act", "approximate", "tanh")
_attribute("scale", "encoder", "layers.1", "scale", 0.1)
_attribute("batch_norm_eps", "images", "blocks.0.bn1", "eps", 0.5)
_attribute("batch_norm_untracked", "images", "blocks.0.bn1", "track_running_stats", False)
_attribute("batch_norm_no_mean", "images", "stem.1", "running_mean", None)
_attribute("negative_slope", "images", "stem.2", "negative_slope", 0.9)
_attribute("padding", "images", "stem.0", "padding", (0, 0))
_attribute("stride", "images", "stem.0", "stride", (2, 2))
_attribute("dilation", "images", "stem.0", "dilation", (2, 2))
_attribute("no_bias", "encoder", "layers.0.up", "bias", None)
_attribute("no_norm_weight", "encoder", "layers.0.norm1", "weight", None)


@change("images")
def _padding_mode(model: Any) -> None:
    model.stem[0].padding_mode = "circular"
    model.stem[0]._reversed_padding_repeated_twice = [1, 1, 1, 1]


@change("images")
def _reset_running_stats(model: Any) -> None:
    model.blocks[0].bn1.reset_running_stats()


def _mode(name: str, network: str, path: str) -> None:
    def function(model: Any) -> Callable[[], Any]:
        model.get_submodule(path).train()
        return lambda: model.get_submodule(path).eval()

    CHANGES[name] = network, function


_mode("training_dropout", "encoder", "layers.0.drop")
_mode("training_layer", "encoder", "layers.1")
_mode("training_dropout_of_images", "images", "blocks.0.drop")
_mode("training_batch_norm", "images", "blocks.0.bn1")
_mode("training_stem_norm", "images", "stem.1")
_mode("training_block", "images", "blocks.1")
_mode("training_all", "images", "")
_mode("training_deep_dropout", "deep", "1.0.2")


@change("images")
def _training_flag(model: Any) -> Callable[[], Any]:
    model.blocks[0].bn1.training = True

    def back() -> None:
        model.blocks[0].bn1.training = False

    return back


def _own_forward(name: str, network: str, path: str, bound: bool) -> None:
    def function(model: Any) -> Callable[[], None]:
        module = model.get_submodule(path)
        original = module.forward

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs) * 0.5

        if bound:
            module.forward = types.MethodType(forward, module)
        else:
            module.forward = lambda *args, **kwargs: original(*args, **kwargs) * 0.25

        def back() -> None:
            module.forward = original

        return back

    CHANGES[name] = network, function


for _path in (
    "layers.0",
    "layers.0.up",
    "layers.0.act",
    "layers.0.norm1",
    "layers.0.query",
    "head.0",
):
    _own_forward(f"own_forward_{_path}", "encoder", _path, True)
for _path in ("blocks.0.bn1", "blocks.0.conv2", "blocks.0.act", "stem.0", "stem"):
    _own_forward(f"lambda_forward_{_path}", "images", _path, False)


def _class_changed(name: str, network: str, path: str, kind: type) -> None:
    def function(model: Any) -> Callable[[], None]:
        module = model.get_submodule(path)
        old = module.__class__
        module.__class__ = kind

        def back() -> None:
            module.__class__ = old

        return back

    CHANGES[name] = network, function


class LouderNorm(nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


_class_changed("class_of_linear", "encoder", "layers.0.down", OtherLinear)
_class_changed("class_of_norm", "encoder", "layers.0.norm1", LouderNorm)
_class_changed("class_of_activation", "deep", "0.1", nn.Tanh)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [*CHANGES])
def test_change(check: Callable[..., None], name: str, form: str) -> None:
    network, changed = CHANGES[name]
    build, sample = NETWORKS[network]

    def use(model: Any, log: Log) -> None:
        x = sample()

        def call() -> None:
            torch.manual_seed(2)
            with torch.no_grad():
                log(model(x), model(x))

        call()
        back = changed(model)
        call()
        if back is not None:
            back()
            call()
        model.eval()
        call()
        log(model.state_dict())

    check(build, use, form, sample)


HOOKS = (
    "forward",
    "forward_changes",
    "forward_kwargs",
    "forward_always",
    "pre",
    "pre_changes",
    "pre_kwargs",
    "backward",
    "backward_pre",
    "backward_changes",
    "tensor_hook",
)


def _add_hook(module: nn.Module, kind: str, name: str, log: Log) -> Any:
    """Add one hook that says where it is and what it sees."""

    def say(*values: Any) -> None:
        log(f"{kind} {name}", *values)

    if kind == "forward":
        return module.register_forward_hook(lambda m, a, out: say(type(m).__name__, a, out))
    if kind == "forward_changes":
        return module.register_forward_hook(lambda m, a, out: out * 0.5)
    if kind == "forward_kwargs":
        return module.register_forward_hook(lambda m, a, k, out: say(a, k, out), with_kwargs=True)
    if kind == "forward_always":
        return module.register_forward_hook(lambda m, a, out: say(out), always_call=True)
    if kind == "pre":
        return module.register_forward_pre_hook(lambda m, a: say(type(m).__name__, a))
    if kind == "pre_changes":
        return module.register_forward_pre_hook(lambda m, a: (a[0] * 0.5, *a[1:]))
    if kind == "pre_kwargs":
        return module.register_forward_pre_hook(lambda m, a, k: say(a, k), with_kwargs=True)
    if kind == "backward":
        return module.register_full_backward_hook(lambda m, gi, go: say(gi, go))
    if kind == "backward_pre":
        return module.register_full_backward_pre_hook(lambda m, go: say(go))
    if kind == "backward_changes":
        return module.register_full_backward_hook(
            lambda m, gi, go: tuple(None if g is None else g * 0.5 for g in gi)
        )

    def on_output(m: nn.Module, a: Any, out: Any) -> None:
        if out.requires_grad:
            out.register_hook(lambda g: say(g))

    return module.register_forward_hook(on_output)


def _hook_places() -> Iterator[Any]:
    for network, (build, _) in NETWORKS.items():
        yield network, ""
        for path, _module in build().named_modules():
            if path and not isinstance(_module, nn.ModuleList):
                yield network, path


def _hook_cases() -> Iterator[Any]:
    number = 0
    for network, path in _hook_places():
        for kind in HOOKS:
            for form in ("default", "sample", "program"):
                number += 1
                marks = () if number % 7 == 0 else pytest.mark.slow
                yield pytest.param(
                    network, path, kind, form, id=f"{network}-{path}-{kind}-{form}", marks=marks
                )


@pytest.mark.parametrize(("network", "path", "kind", "form"), _hook_cases())
def test_hook(check: Callable[..., None], network: str, path: str, kind: str, form: str) -> None:
    build, sample = NETWORKS[network]
    with_gradients = "backward" in kind or kind == "tensor_hook"

    def use(model: Any, log: Log) -> None:
        x = sample()
        with torch.no_grad():
            log(model(x), model(x))
        handle = _add_hook(model.get_submodule(path), kind, path, log)
        for _ in range(2):
            if with_gradients:
                inputs = x.clone().requires_grad_()
                model(inputs).pow(2).sum().backward()
                log(inputs.grad)
            with torch.no_grad():
                log(model(x))
        handle.remove()
        with torch.no_grad():
            log(model(x))

    check(build, use, form, sample)


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("network", [*NETWORKS])
def test_hook_from_before(check: Callable[..., None], network: str, kind: str) -> None:
    """Hooks that stand on every part when the model is optimized."""
    build, sample = NETWORKS[network]
    lines: list[Log] = []

    def hooked() -> Any:
        model = build()
        quiet = Log()
        lines.append(quiet)
        for path, module in model.named_modules():
            if not isinstance(module, nn.ModuleList) and "changes" not in kind:
                _add_hook(module, kind, path, quiet)
        return model

    def use(model: Any, log: Log) -> None:
        heard = lines[-1]
        heard.seen.clear()
        x = sample()
        with torch.no_grad():
            log(model(x))
        inputs = x.clone().requires_grad_()
        model(inputs).pow(2).sum().backward()
        log(inputs.grad)
        log.seen.extend(heard.seen)

    check(hooked, use, "sample", sample)


GLOBAL_HOOKS = ("forward", "pre", "backward", "backward_pre")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", GLOBAL_HOOKS)
def test_global_hook(check: Callable[..., None], kind: str, form: str) -> None:
    build, sample = NETWORKS["encoder"]
    from torch.nn.modules import module as hooks

    def use(model: Any, log: Log) -> None:
        x = sample()
        with torch.no_grad():
            log(model(x), model(x))

        def say(module: nn.Module, *values: Any) -> None:
            log(type(module).__name__, len(values))

        register = {
            "forward": hooks.register_module_forward_hook,
            "pre": hooks.register_module_forward_pre_hook,
            "backward": hooks.register_module_full_backward_hook,
            "backward_pre": hooks.register_module_full_backward_pre_hook,
        }[kind]
        with register(say):
            with torch.no_grad():
                log(model(x))
            inputs = x.clone().requires_grad_()
            model(inputs).sum().backward()
            log(inputs.grad)
        with torch.no_grad():
            log(model(x))

    check(build, use, form, sample)


@pytest.mark.parametrize("kind", ["forward_global_changes", "pre_global_changes"])
def test_global_hook_that_changes(check: Callable[..., None], kind: str) -> None:
    build, sample = NETWORKS["images"]
    from torch.nn.modules import module as hooks

    def use(model: Any, log: Log) -> None:
        x = sample()

        def halve(module: nn.Module, args: Any, out: Any = None) -> Any:
            if isinstance(module, nn.ReLU):
                return out * 0.5 if out is not None else (args[0] * 0.5,)
            return None

        is_after = kind.startswith("forward")
        register = (
            hooks.register_module_forward_hook
            if is_after
            else hooks.register_module_forward_pre_hook
        )
        with register(halve), torch.no_grad():
            log(model(x), model(x))
        with torch.no_grad():
            log(model(x))

    check(build, use, "sample", sample)


@pytest.mark.parametrize("kind", ["state_dict", "state_dict_pre", "load_pre", "load_post"])
@pytest.mark.parametrize("network", [*NETWORKS])
def test_state_dict_hook(check: Callable[..., None], network: str, kind: str) -> None:
    build, sample = NETWORKS[network]

    def use(model: Any, log: Log) -> None:
        for path, module in model.named_modules():
            if kind == "state_dict":
                module._register_state_dict_hook(
                    lambda m, state, prefix, metadata, at=path: log(at, prefix, len(state))
                )
            elif kind == "state_dict_pre":
                module.register_state_dict_pre_hook(
                    lambda m, prefix, keep, at=path: log(at, prefix, keep)
                )
            elif kind == "load_pre":
                module._register_load_state_dict_pre_hook(
                    lambda state, prefix, *rest, at=path: log(at, prefix, len(state))
                )
            else:
                module.register_load_state_dict_post_hook(
                    lambda m, keys, at=path: log(at, keys.missing_keys, keys.unexpected_keys)
                )
        state = {k: v * 0.5 if v.is_floating_point() else v for k, v in model.state_dict().items()}
        model.load_state_dict(state)
        with torch.no_grad():
            log(model(sample()))

    check(build, use, "sample", sample)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("network", [*NETWORKS])
def test_parts_used_alone(check: Callable[..., None], network: str, form: str) -> None:
    """Feature extractors: each part is called by itself and in a new Sequential."""
    build, sample = NETWORKS[network]

    def use(model: Any, log: Log) -> None:
        x = sample()
        seen: dict[str, Any] = {}
        handles = [
            module.register_forward_pre_hook(lambda m, a, at=path: seen.update({at: a[0].clone()}))
            for path, module in model.named_modules()
            if not isinstance(module, nn.ModuleList)
        ]
        with torch.no_grad():
            log(model(x))
        for handle in handles:
            handle.remove()
        for path, value in seen.items():
            with torch.no_grad():
                module = model.get_submodule(path)
                log(path, module(value), nn.Sequential(module, nn.Tanh())(value))
                log(module(value), value)
        with torch.no_grad():
            log(model(x))

    check(build, use, form, sample)


@pytest.mark.parametrize("form", ["default", "sample"])
def test_sequential_sliced(check: Callable[..., None], form: str) -> None:
    build, sample = NETWORKS["deep"]

    def use(model: Any, log: Log) -> None:
        x = sample()
        with torch.no_grad():
            log(model(x), model[:1](x), model[1][0][1:](x), nn.Sequential(*model[0][:2])(x))
            log(nn.Sequential(*model.children())(x), model[0][0](x), model[0][1](x))

    check(build, use, form, sample)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("only", ["weight", "bias", "all"])
@pytest.mark.parametrize("form", ["default", "sample", "all"])
@pytest.mark.parametrize("name", [*KINDS])
def test_plain_tensors_in_place_of_parameters(
    check: Callable[..., None], name: str, form: str, only: str, when: str
) -> None:
    kind = KINDS[name]

    def change(model: nn.Module) -> None:
        for part in model.modules():
            for key, parameter in [*part._parameters.items()]:
                if parameter is not None and (only == "all" or key.startswith(only)):
                    delattr(part, key)
                    setattr(part, key, parameter.detach() * 1.5)

    def build() -> nn.Module:
        model = kind.build()
        if when == "before":
            change(model)
        return model

    def use(model: Any, log: Log) -> None:
        with torch.no_grad():
            if when == "after":
                log(model(kind.sample()))
                change(model)
            log(model(kind.sample()))
            log(model(kind.sample()))

    check(build, use, form, kind.sample)


@pytest.mark.parametrize("form", ["default", "sample", "all", "bfloat16"])
@pytest.mark.parametrize(
    ("network", "path"),
    [("encoder", "layers.0"), ("encoder", "layers.0.up"), ("encoder", "layers.0.norm1"),
     ("encoder", "layers.0.act"), ("encoder", ""), ("images", "blocks.0.conv2"),
     ("images", "blocks.0.bn1"), ("images", "")],
)  # fmt: skip
def test_forward_put_in_place_before(network: str, path: str, form: str) -> None:
    """A module whose forward was replaced on the instance keeps that forward."""
    from .compare import optimized

    made, sample = NETWORKS[network]
    torch.manual_seed(0)
    model, x = made().eval(), sample()
    with torch.no_grad():
        plain = model(x)
    module = model.get_submodule(path)
    original = module.forward
    module.forward = lambda *args, **kwargs: original(*args, **kwargs) * 3.0
    with torch.no_grad():
        expected = model(x)
    found = optimized(model, form, x)
    tolerance = 0.2 if form == "bfloat16" else 1e-4
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(found(x).float(), expected, rtol=tolerance, atol=tolerance)
    module.__dict__.pop("forward")
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain)
