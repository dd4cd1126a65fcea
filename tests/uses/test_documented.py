"""What the reference pages of PyTorch show of modules, beyond the tutorials of `test_idioms.py`."""

from __future__ import annotations

import copy
import functools
import io
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils import checkpoint

from .compare import Log
from .named import FORMS, check_named
from .registers import into_of

Use = Callable[[Any, torch.Tensor, Log], None]
DOCUMENTED: dict[str, tuple[str, Use]] = {}
documented = into_of(DOCUMENTED)
"""Registers something that a reference page shows, for networks whose names it is given."""


def _see(model: Any, x: torch.Tensor, log: Log) -> None:
    with torch.no_grad():
        log(model(x), model(x))


def _linear(model: Any) -> Any:
    return next(m for m in model.modules() if isinstance(m, nn.Linear))


def _layer(model: Any) -> Any:
    return next(m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d))


# torch.nn.utils


class _Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)

    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu()


@documented("encoder")
def _parametrized_and_back(model: Any, x: torch.Tensor, log: Log) -> None:
    layer = model.layers[0].query
    parametrize.register_parametrization(layer, "weight", _Symmetric())
    _see(model, x, log)
    layer.weight = torch.ones(12, 12)
    _see(model, x, log)
    with parametrize.cached():
        _see(model, x, log)
    parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
    _see(model, x, log)


@documented("encoder", "images")
def _normed_weights_and_back(model: Any, x: torch.Tensor, log: Log) -> None:
    layer = _layer(model)
    for norm in (parametrizations.weight_norm, parametrizations.orthogonal):
        norm(layer)
        _see(model, x, log)
        parametrize.remove_parametrizations(layer, "weight")
        _see(model, x, log)
    parametrizations.spectral_norm(layer)
    model.train()
    torch.manual_seed(3)
    log(model(x).shape)
    _see(model.eval(), x, log)


@documented("encoder", "images")
def _pruned_over_all_layers(model: Any, x: torch.Tensor, log: Log) -> None:
    parts = [(m, "weight") for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    prune.global_unstructured(parts, pruning_method=prune.L1Unstructured, amount=0.5)
    _see(model, x, log)
    for module, name in parts:
        prune.remove(module, name)
    _see(model, x, log)
    prune.ln_structured(parts[0][0], "weight", amount=0.3, n=2, dim=0)
    _see(model, x, log)
    log(sum(int((m.weight == 0).sum()) for m, _ in parts))


@documented("encoder", "images")
def _norms_of_gradients(model: Any, x: torch.Tensor, log: Log) -> None:
    model(x).pow(2).sum().backward()
    gradients = [p.grad for p in model.parameters()]
    total = nn.utils.get_total_norm(gradients)
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, total)
    log(total, gradients)


# torch.nn.Module


@documented("encoder", "images")
def _initialized_by_apply(model: Any, x: torch.Tensor, log: Log) -> None:
    torch.manual_seed(4)

    def initialize(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)

    model.apply(initialize)
    _see(model, x, log)


@documented("encoder", "images")
def _emptied_and_reset(model: Any, x: torch.Tensor, log: Log) -> None:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.to_empty(device="cpu")
    torch.manual_seed(4)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    log(model.load_state_dict(state).missing_keys)
    _see(model, x, log)


@documented("encoder", "images")
def _through_meta_by_assignment(model: Any, x: torch.Tensor, log: Log) -> None:
    state = {name: value.clone() * 0.5 for name, value in model.state_dict().items()}
    model.to("meta")
    log([p.device.type for p in model.parameters()])
    model.load_state_dict(state, assign=True)
    _see(model, x, log)


@documented("encoder", "images")
def _named_parts(model: Any, x: torch.Tensor, log: Log) -> None:
    name = next(n for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d))
    layer = model.get_submodule(name)
    weight = model.get_parameter(f"{name}.weight")
    log(weight is layer.weight, layer.extra_repr(), weight.shape)
    model.set_submodule(name, copy.deepcopy(layer))
    with torch.no_grad():
        model.get_parameter(f"{name}.weight").mul_(0.5)
    _see(model, x, log)
    layer.register_parameter("weight", nn.Parameter(torch.ones_like(weight)))
    model.set_submodule(name, layer)
    _see(model, x, log)


@documented("encoder", "images")
def _buffer_and_lazy_layer_added(model: Any, x: torch.Tensor, log: Log) -> None:
    layer = _layer(model)
    layer.register_buffer("shift", torch.tensor(0.5), persistent=False)
    layer.register_forward_hook(lambda module, args, out: out + module.shift)
    _see(model, x, log)
    layer.shift.add_(1)
    _see(model, x, log)
    torch.manual_seed(5)
    name = "fc" if hasattr(model, "fc") else "head"
    setattr(model, name, nn.LazyLinear(3))
    _see(model, x, log)
    log(getattr(model, name))


@documented("encoder", "images", "lstm")
def _swapped_tensors(model: Any, x: torch.Tensor, log: Log) -> None:
    """Torch refuses to swap a tensor to which something in C++ refers, or a weak reference, as
    those that `nn.LSTM` has to its weights."""
    for module in [*model.modules()]:
        for p in [*module.parameters(recurse=False)]:
            q = nn.Parameter(p.detach().clone() * 0.5)
            if isinstance(module, nn.LSTM):
                p.data = q.data
            else:
                torch.utils.swap_tensors(p, q)
    _see(model, x, log)


@documented("encoder", "images")
def _extra_state(model: Any, x: torch.Tensor, log: Log) -> None:
    layer = _layer(model)
    kind = type(
        "Counted",
        (type(layer),),
        {
            "get_extra_state": lambda self: {"scale": self.scale},
            "set_extra_state": lambda self, state: setattr(self, "scale", state["scale"]),
            "forward": lambda self, x: super(kind, self).forward(x) * self.scale,
        },
    )
    layer.scale = 2.0
    layer.__class__ = kind
    _see(model, x, log)
    state = model.state_dict()
    layer.scale = 3.0
    _see(model, x, log)
    model.load_state_dict(state)
    _see(model, x, log)


@documented("encoder", "images", "linear", "conv2d_norm")
def _forward_wrapped_and_bound_again(model: Any, x: torch.Tensor, log: Log) -> None:
    """As in accelerate: a forward is found behind its wrapper, and bound as a function."""
    for module in (model, *model.children()):
        own = module.forward
        wrapped = functools.wraps(own)(lambda *args, own=own: own(*args) * 2)
        module.forward = wrapped
        _see(model, x, log)
        found = wrapped.__wrapped__
        module.forward = types.MethodType(getattr(found, "__func__", found), module)
        _see(model, x, log)


# torch.autograd


@documented("encoder", "images")
def _dual_weights(model: Any, x: torch.Tensor, log: Log) -> None:
    values = {n: p.detach() for n, p in model.named_parameters()}
    with forward_ad.dual_level():
        duals = {n: forward_ad.make_dual(p, torch.ones_like(p)) for n, p in values.items()}
        out = torch.func.functional_call(model, duals, (x,))
        log(*forward_ad.unpack_dual(out))
        log(*forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x)))))
    _see(model, x, log)


@documented("encoder", "images")
def _optimizers_in_backward(model: Any, x: torch.Tensor, log: Log) -> None:
    optimizers = {p: torch.optim.Adam([p], lr=1e-2, foreach=False) for p in model.parameters()}

    def step(p: Any) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for _ in range(2):
        model(x).pow(2).mean().backward()
    log([p.grad is None for p in model.parameters()])
    _see(model, x, log)


@documented("encoder", "images")
def _hooks_over_gradients(model: Any, x: torch.Tensor, log: Log) -> None:
    parameters = [*model.parameters()]
    seen: list[Any] = []
    handle = torch.autograd.graph.register_multi_grad_hook(
        parameters, lambda grads: seen.append([g is None for g in grads])
    )
    out = model(x)
    edge = torch.autograd.graph.get_gradient_edge(out)
    log(type(edge.node).__name__)
    out.grad_fn.register_prehook(lambda grads: tuple(g * 2 for g in grads))
    out.sum().backward()
    handle.remove()
    log(seen, [p.grad for p in parameters])


@documented("encoder", "images")
def _products_with_derivatives(model: Any, x: torch.Tensor, log: Log) -> None:
    functional = torch.autograd.functional
    log(functional.jvp(model, x, torch.ones_like(x)), functional.vjp(model, x, model(x).detach()))
    log(functional.hvp(lambda v: model(v).pow(2).sum(), x, torch.ones_like(x)))


@documented("encoder", "images")
def _mutation_of_saved_tensors(model: Any, x: torch.Tensor, log: Log) -> None:
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        out = model(x).pow(2)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.9)
        out.sum().backward()
    log([p.grad for p in model.parameters()])
    _see(model, x, log)


@documented("encoder")
def _selective_checkpoints(model: Any, x: torch.Tensor, log: Log) -> None:
    kept: list[str] = []

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
        kept.append(str(operator))
        is_product = operator is torch.ops.aten.addmm.default
        policies = checkpoint.CheckpointPolicy
        return policies.MUST_SAVE if is_product else policies.PREFER_RECOMPUTE

    contexts = lambda: checkpoint.create_selective_checkpoint_contexts(policy)  # noqa: E731
    out = checkpoint.checkpoint(model, x, use_reentrant=False, context_fn=contexts)
    out.sum().backward()
    log(out, sorted({*kept}), [p.grad for p in model.parameters()])


@documented("encoder", "images")
def _saved_on_cpu_and_counted(model: Any, x: torch.Tensor, log: Log) -> None:
    with torch.autograd.graph.save_on_cpu():
        model(x).sum().backward()
    log([p.grad for p in model.parameters()])
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(x)
    log(counter.get_total_flops())


# torch.func, torch.nn.attention, torch.optim


@documented("encoder")
def _dropout_under_vmap(model: Any, x: torch.Tensor, log: Log) -> None:
    model.train()
    torch.manual_seed(6)
    found = torch.func.vmap(model, randomness="different")(x)
    log(found.shape, bool(torch.isfinite(found).all()))
    log(torch.func.vmap(model.eval(), in_dims=1, out_dims=1)(x))


@documented("encoder")
def _attention_by_another_backend(model: Any, x: torch.Tensor, log: Log) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        _see(model, x, log)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
        _see(model, x, log)


@documented("images", "linear_norm")
def _stochastic_averages(model: Any, x: torch.Tensor, log: Log) -> None:
    from torch.optim import swa_utils

    average = swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    schedule = swa_utils.SWALR(optimizer, swa_lr=0.01, anneal_epochs=2)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
        average.update_parameters(model)
        schedule.step()
    swa_utils.update_bn([x, x * 2], average)
    _see(average.eval(), x, log)
    log(schedule.get_last_lr())


@documented("encoder", "images")
def _hooks_of_optimizers(model: Any, x: torch.Tensor, log: Log) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=True)
    order: list[str] = []
    optimizer.register_step_pre_hook(lambda *a: order.append("before"))
    optimizer.register_step_post_hook(lambda *a: order.append("after"))
    for scheduler in (torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4),):
        for _ in range(2):
            optimizer.zero_grad(set_to_none=False)
            model(x).pow(2).mean().backward()
            optimizer.step()
            scheduler.step()
    log(order)
    _see(model, x, log)


# Files and programs


@documented("encoder", "images")
def _exported_to_a_file(model: Any, x: torch.Tensor, log: Log) -> None:
    file = io.BytesIO()
    torch.export.save(torch.export.export(model, (x,)), file)
    file.seek(0)
    _see(torch.export.load(file).module(), x, log)
    _see(model, x, log)


@documented("encoder", "images")
def _frozen_and_optimized_by_torch(model: Any, x: torch.Tensor, log: Log) -> None:
    with torch.no_grad():
        traced = torch.jit.trace(model, x, check_trace=False)
        _see(torch.jit.freeze(traced), x, log)
        _see(torch.jit.optimize_for_inference(traced), x, log)


@documented("images")
def _fused_by_fx(model: Any, x: torch.Tensor, log: Log) -> None:
    from torch.fx.experimental.optimization import fuse, remove_dropout

    _see(fuse(model), x, log)
    _see(remove_dropout(model), x, log)
    _see(model, x, log)


@documented("images")
def _features_by_fx(model: Any, x: torch.Tensor, log: Log) -> None:
    graph = torch.fx.symbolic_trace(model)
    log([str(node.op) for node in graph.graph.nodes][:3])
    interpreter = torch.fx.Interpreter(graph)
    with torch.no_grad():
        log(interpreter.run(x))


@documented("encoder")
def _tensor_parallel(model: Any, x: torch.Tensor, log: Log) -> None:
    import torch.distributed as dist
    from torch.distributed.tensor import parallel

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        plan = {"up": parallel.ColwiseParallel(), "down": parallel.RowwiseParallel()}
        parallel.parallelize_module(model.layers[0], mesh, plan)
        with torch.no_grad():
            log(model(x))
        model(x).sum().backward()
        log(model.layers[1].up.weight.grad)
    finally:
        dist.destroy_process_group()


@documented("encoder", "images")
def _strict_loading_of_parts(model: Any, x: torch.Tensor, log: Log) -> None:
    state = {n: v * 0.5 for n, v in model.state_dict().items() if v.is_floating_point()}
    name = next(iter(state))
    state["head_of_another"] = state.pop(name)
    found = model.load_state_dict(state, strict=False)
    log(sorted(found.unexpected_keys), name in found.missing_keys)
    _see(model, x, log)
    state.pop("head_of_another")
    state[name] = torch.zeros(3)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        log(error)
    _see(model, x, log)


@documented("tied", "encoder")
def _names_of_all_places(model: Any, x: torch.Tensor, log: Log) -> None:
    log([n for n, _ in model.named_parameters(remove_duplicate=False)])
    log(sum(p.numel() for p in model.parameters()), [*model.state_dict()])
    log({n: (p.is_leaf, p.requires_grad) for n, p in model.named_parameters()})
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 0.5, model.parameters())
    _see(model, x, log)


@documented("encoder", "images", "lstm")
def _decayed_by_foreach(model: Any, x: torch.Tensor, log: Log) -> None:
    with torch.no_grad():
        before = [p.clone() for p in model.parameters()]
        torch._foreach_mul_([*model.parameters()], 0.5)
        torch._foreach_lerp_([*model.parameters()], before, 0.25)
        torch._foreach_copy_([*model.parameters()][:1], before[:1])
    log(torch._foreach_norm([p.detach() for p in model.parameters()]))
    _see(model, x, log)


@documented("encoder")
def _layers_chosen_by_a_generator(model: Any, x: torch.Tensor, log: Log) -> None:
    """Stochastic depth: which layers run is drawn at each call."""
    torch.manual_seed(7)
    own = [*model.layers]
    for _ in range(4):
        kept = [layer for layer in own if torch.rand(()) > 0.4]
        model.layers = nn.ModuleList(kept)
        _see(model, x, log)


@documented("encoder")
def _losses_over_weights(model: Any, x: torch.Tensor, log: Log) -> None:
    penalty = sum(p.abs().sum() for n, p in model.named_parameters() if n.endswith("weight"))
    loss = F.mse_loss(model(x), torch.ones(2, 5, 4)) + 1e-3 * penalty
    loss.backward()
    layer = _linear(model)
    log(loss, layer.weight.grad, F.cosine_similarity(layer.weight, layer.weight + 1).sum())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [*DOCUMENTED])
def test_documented_use(check: Callable[..., None], name: str, form: str) -> None:
    network, function = DOCUMENTED[name]
    check_named(check, network, function, form)
