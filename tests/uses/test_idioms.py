"""What the tutorials of PyTorch do with a model."""

from __future__ import annotations

import copy
import io
import os
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from .compare import Log
from .named import FORMS, check_named
from .registers import into_of

Idiom = Callable[[Any, torch.Tensor, Log], None]
IDIOMS: dict[str, tuple[str, Idiom]] = {}
idiom = into_of(IDIOMS)
"""Registers something that users do with these networks, whose names it is given."""


def _see(model: Any, x: torch.Tensor, log: Log) -> None:
    with torch.no_grad():
        result = model(x)
        log(result, model(x))


def _train(model: Any, x: torch.Tensor, log: Log, parameters: Any, steps: int = 3) -> None:
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        result = model(x)
        loss = (result[0] if isinstance(result, tuple) else result).pow(2).mean()
        loss.backward()
        optimizer.step()
        log(loss)


# Transfer learning and surgery


@idiom("images")
def _new_classifier_is_trained(model: Any, x: torch.Tensor, log: Log) -> None:
    for p in model.parameters():
        p.requires_grad = False
    model.fc = nn.Linear(model.fc.in_features, 2)
    _train(model, x, log, model.fc.parameters())
    _see(model, x, log)


@idiom("encoder", "images")
def _gradual_unfreezing(model: Any, x: torch.Tensor, log: Log) -> None:
    model.requires_grad_(False)
    for _, child in reversed([*model.named_children()]):
        child.requires_grad_(True)
        trained = [p for p in model.parameters() if p.requires_grad]
        if trained:
            _train(model, x, log, trained, 1)
        _see(model, x, log)


@idiom("encoder", "images")
def _training_and_validation(model: Any, x: torch.Tensor, log: Log) -> None:
    for _ in range(3):
        model.train()
        torch.manual_seed(3)
        _train(model, x, log, model.parameters(), 2)
        model.eval()
        _see(model, x, log)


@idiom("encoder", "images", "deep")
def _best_state_restored(model: Any, x: torch.Tensor, log: Log) -> None:
    best = copy.deepcopy(model.state_dict())
    _train(model, x, log, model.parameters(), 2)
    _see(model, x, log)
    model.load_state_dict(best)
    _see(model, x, log)


@idiom("encoder", "images")
def _checkpoint_of_model_and_optimizer(model: Any, x: torch.Tensor, log: Log) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    file = io.BytesIO()
    for _ in range(2):
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    for p in model.parameters():
        nn.init.zeros_(p)
    file.seek(0)
    stored = torch.load(file, map_location="cpu")
    model.load_state_dict(stored["model"])
    optimizer.load_state_dict(stored["optimizer"])
    model(x).pow(2).mean().backward()
    optimizer.step()
    _see(model, x, log)


@idiom("encoder", "images")
def _lbfgs(model: Any, x: torch.Tensor, log: Log) -> None:
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        return loss

    log(optimizer.step(closure))
    _see(model, x, log)


@idiom("encoder", "images")
def _groups_by_dimension(model: Any, x: torch.Tensor, log: Log) -> None:
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    model(x).pow(2).mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)
    optimizer.step()
    log(
        len(decayed),
        len(others),
        [p is q for p, q in zip(decayed, optimizer.param_groups[0]["params"], strict=True)],
    )
    _see(model, x, log)


@idiom("encoder")
def _manual_step(model: Any, x: torch.Tensor, log: Log) -> None:
    for _ in range(2):
        model(x).pow(2).mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.05 * p.grad
                p.grad.zero_()
        for p in model.parameters():
            p.data.sub_(0.01 * p.data)
    _see(model, x, log)


@idiom("encoder", "images")
def _grad_scaler_and_autocast(model: Any, x: torch.Tensor, log: Log) -> None:
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(x).float().pow(2).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    with torch.no_grad():
        log(model(x) > -1e9, loss.dtype)


@idiom("encoder")
def _distillation(model: Any, x: torch.Tensor, log: Log) -> None:
    student = copy.deepcopy(model).train()
    teacher = model.eval().requires_grad_(False)
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-2)
    for i in range(2):
        torch.manual_seed(i)
        with torch.no_grad():
            target = teacher(x)
        loss = F.mse_loss(student(x), target)
        loss.backward()
        optimizer.step()
        log(loss, target)
    _see(student.eval(), x, log)
    _see(teacher, x, log)


@idiom("encoder")
def _adversarial_example(model: Any, x: torch.Tensor, log: Log) -> None:
    model.requires_grad_(False)
    for _ in range(2):
        x = x.detach().requires_grad_()
        loss = F.cross_entropy(model(x).flatten(0, 1), torch.zeros(10, dtype=torch.long))
        loss.backward()
        x = x + 0.1 * x.grad.sign()
    log(x)


@idiom("encoder", "images")
def _saliency_with_hooks(model: Any, x: torch.Tensor, log: Log) -> None:
    """Grad-CAM: activations and gradients of one part."""
    part = model.blocks if hasattr(model, "blocks") else model.layers[0].up
    seen: dict[str, torch.Tensor] = {}
    part.register_forward_hook(lambda m, a, out: seen.update(out=out))
    part.register_full_backward_hook(lambda m, gi, go: seen.update(grad=go[0]))
    model(x).flatten(1)[:, 0].sum().backward()
    log(seen["out"], seen["grad"], (seen["out"] * seen["grad"]).sum(1).relu())


@idiom("encoder")
def _activation_patching(model: Any, x: torch.Tensor, log: Log) -> None:
    """Interpretability: the output of one run is put into another."""
    kept: list[torch.Tensor] = []
    handle = model.layers[0].act.register_forward_hook(lambda m, a, out: kept.append(out.clone()))
    _see(model, x, log)
    handle.remove()
    handle = model.layers[0].act.register_forward_hook(lambda m, a, out: kept[0])
    _see(model, x * 2, log)
    handle.remove()
    _see(model, x * 2, log)


@idiom("encoder")
def _adapters_added(model: Any, x: torch.Tensor, log: Log) -> None:
    class Adapter(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.down, self.up = inner, nn.Linear(12, 3), nn.Linear(3, 12)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.inner(x)
            return h + self.up(F.relu(self.down(h)))

    torch.manual_seed(2)
    model.requires_grad_(False)
    for i, layer in enumerate(model.layers):
        model.layers[i] = Adapter(layer)
    _see(model, x, log)
    _train(model, x, log, [p for p in model.parameters() if p.requires_grad])
    _see(model, x, log)


def _merge(layer: nn.Linear, sign: float) -> None:
    a = torch.full((2, layer.in_features), 0.1)
    b = torch.full((layer.out_features, 2), 0.2)
    layer.weight.data += sign * (b @ a)


@idiom("encoder", "linear", "linear_norm")
def _lora_merged_and_unmerged(model: Any, x: torch.Tensor, log: Log) -> None:
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    for layer in layers:
        _merge(layer, 1)
    _see(model, x, log)
    for layer in layers:
        _merge(layer, -1)
    _see(model, x, log)


@idiom("encoder", "linear")
def _low_rank_by_svd(model: Any, x: torch.Tensor, log: Log) -> None:
    for name, module in [*model.named_modules()]:
        if isinstance(module, nn.Linear):
            u, s, v = torch.linalg.svd(module.weight.data, full_matrices=False)
            k = 4
            first = nn.Linear(module.in_features, k, bias=False)
            second = nn.Linear(k, module.out_features)
            first.weight.data = torch.diag(s[:k]) @ v[:k]
            second.weight.data, second.bias.data = u[:, :k].clone(), module.bias.data
            model.set_submodule(name, nn.Sequential(first, second))
    _see(model, x, log)


@idiom("encoder", "linear")
def _rows_removed(model: Any, x: torch.Tensor, log: Log) -> None:
    """Structured pruning: a smaller layer with the rows that are kept."""
    up, down = (
        (model.layers[0].up, model.layers[0].down)
        if hasattr(model, "layers")
        else (model[0], model[2])
    )
    keep = up.weight.abs().sum(1).argsort()[2:].sort().values
    up.weight = nn.Parameter(up.weight.data[keep])
    up.bias = nn.Parameter(up.bias.data[keep])
    down.weight = nn.Parameter(down.weight.data[:, keep])
    up.out_features = down.in_features = len(keep)
    _see(model, x, log)
    _train(model, x, log, model.parameters(), 2)


@idiom("tied")
def _vocabulary_extended(model: Any, x: torch.Tensor, log: Log) -> None:
    embed = nn.Embedding(43, 12)
    torch.manual_seed(4)
    nn.init.normal_(embed.weight)
    embed.weight.data[:40] = model.embed.weight.data
    model.embed = embed
    model.head = nn.Linear(12, 43, bias=False)
    model.head.weight = model.embed.weight
    _see(model, x + 10, log)
    _train(model, x, log, model.parameters(), 2)
    log(model.head.weight is model.embed.weight)
    _see(model, x, log)


@idiom("tied")
def _untied(model: Any, x: torch.Tensor, log: Log) -> None:
    model.head.weight = nn.Parameter(model.head.weight.clone())
    with torch.no_grad():
        model.head.weight.mul_(0.5)
    _see(model, x, log)
    with torch.no_grad():
        model.embed.weight.mul_(0.5)
    _see(model, x, log)


@idiom("two_names", "encoder")
def _tied_later(model: Any, x: torch.Tensor, log: Log) -> None:
    if hasattr(model, "layers"):
        model.layers[1].query.weight = model.layers[0].query.weight
        model.layers[1].load_state_dict(model.layers[0].state_dict())
    else:
        model.second.bias = model.first.bias
    _see(model, x, log)
    _train(model, x, log, model.parameters(), 2)
    _see(model, x, log)


@idiom("linear", "conv2d", "conv2d_norm", "lstm")
def _weights_given_to_another_module(model: Any, x: torch.Tensor, log: Log) -> None:
    """A stock module that shares the parameters of the optimized one."""
    part = next(m for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d, nn.LSTM)))
    other = copy.deepcopy(part) if isinstance(part, nn.LSTM) else type(part)(*_sizes(part))
    for name, p in part.named_parameters(recurse=False):
        setattr(other, name, p)
    _see(other, x, log)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(0.5)
    _see(other, x, log)
    _see(model, x, log)


def _sizes(part: Any) -> tuple[Any, ...]:
    if isinstance(part, nn.Linear):
        return part.in_features, part.out_features
    return part.in_channels, part.out_channels, part.kernel_size, part.stride, part.padding


@idiom("linear", "conv2d_norm", "encoder", "lstm")
def _weights_in_expressions(model: Any, x: torch.Tensor, log: Log) -> None:
    for name, p in model.named_parameters():
        log(name, p * 2, 1 - p, p**2, -p, abs(p), p / 3, p > 0, p.mean(), p.std(), p.flatten())
        log(p.reshape(-1)[0], p.clone(), p.detach().clone(), p.new_zeros(2), torch.zeros_like(p))
        log(torch.stack([p, p]), torch.cat([p, p]), p.to(torch.bfloat16), p.half().float(), p.int())
        log(
            torch.where(p > 0, p, 0),
            p.topk(1, 0).values,
            p.unsqueeze(0),
            p.expand_as(p),
            p.tolist(),
        )
        log(torch.norm(p), p.argmax(), p.min(), p.sort(0).values, p.cumsum(0), p.roll(1, 0), p[...])
        log(torch.save(p, io.BytesIO()), float(p.sum()), p.data.sum().item(), bool(p.isnan().any()))
        if p.dim() == 2:
            log(p.T, p @ p.t(), torch.linalg.svdvals(p), torch.einsum("ij,kj->ik", p, p), p[:, 1:3])
            log(F.embedding(torch.tensor([1, 2]), p), F.normalize(p), p.diagonal(), p.triu())


@idiom("linear", "conv2d_norm", "lstm")
def _weight_saved_alone(model: Any, x: torch.Tensor, log: Log) -> None:
    p = next(model.parameters())
    file = io.BytesIO()
    torch.save(p, file)
    file.seek(0)
    log(torch.load(file), len(file.getvalue()) < 50_000)
    file = io.BytesIO()
    torch.save([*model.parameters()], file)
    file.seek(0)
    log(torch.load(file, weights_only=False))


@idiom("linear", "conv2d_norm", "lstm", "encoder")
def _identity_of_parameters(model: Any, x: torch.Tensor, log: Log) -> None:
    before = [*model.parameters()]
    _see(model, x, log)
    after = [*model.parameters()]
    log([p is q for p, q in zip(before, after, strict=True)], len({*before}), before[0] in {*after})
    _train(model, x, log, before, 1)
    log([p is q for p, q in zip(before, model.parameters(), strict=True)])
    with torch.no_grad():
        for p in before:
            p.zero_()
    log([float(p.abs().sum()) for p in model.parameters()])
    log([model.get_parameter(n) is p for n, p in model.named_parameters()])
    references = [weakref.ref(p) for p in before]
    log([r() is not None for r in references])


@idiom("linear", "encoder")
def _expanded_by_hand(model: Any, x: torch.Tensor, log: Log) -> None:
    """The forward written out by the user from the parts and their weights."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            y = torch.randn(3, module.in_features, generator=torch.Generator().manual_seed(1))
            with torch.no_grad():
                log(
                    y @ module.weight.T + module.bias,
                    torch.addmm(module.bias, y, module.weight.t()),
                )
                log(torch.matmul(y, module.weight.transpose(0, 1)), module.weight.matmul(y.t()))
                log(F.linear(y, module.weight), module(y), F.linear(y, module.weight.data, None))
                log(
                    torch.baddbmm(
                        y[None],
                        y[None],
                        module.weight[None, :, :].mT[..., :0].new_zeros(1, y.shape[1], y.shape[1]),
                    )
                )


# Tools of torch.nn.utils and others


@idiom("conv2d_norm", "conv1d_norm")
def _fused_by_torch(model: Any, x: torch.Tensor, log: Log) -> None:
    from torch.nn.utils.fusion import fuse_conv_bn_eval

    if isinstance(model[0], nn.Conv2d):
        fused = fuse_conv_bn_eval(model[0], model[1])
        _see(nn.Sequential(fused, model[2]), x, log)
    _see(model, x, log)


@idiom("conv2d_norm", "images")
def _sync_batch_norm(model: Any, x: torch.Tensor, log: Log) -> None:
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    _see(converted, x, log)


@idiom("images")
def _frozen_batch_norm(model: Any, x: torch.Tensor, log: Log) -> None:
    """Train with the norms in evaluation mode."""
    model.train()
    for m in model.modules():
        if isinstance(m, (nn.BatchNorm2d, nn.Dropout)):
            m.eval()
    _train(model, x, log, model.parameters())
    _see(model, x, log)
    _see(model.eval(), x, log)


@idiom("images")
def _test_time_adaptation(model: Any, x: torch.Tensor, log: Log) -> None:
    """Only batch norms are trained, with statistics of the batch (TENT)."""
    model.requires_grad_(False)
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.requires_grad_(True)
            m.track_running_stats = False
            m.running_mean = m.running_var = None
    _see(model, x, log)
    _train(model, x, log, [p for p in model.parameters() if p.requires_grad])
    _see(model, x, log)


@idiom("images", "encoder")
def _dropout_at_inference(model: Any, x: torch.Tensor, log: Log) -> None:
    """Monte-Carlo dropout: only dropout layers are in training mode."""
    _see(model, x, log)
    for m in model.modules():
        if isinstance(m, nn.Dropout):
            m.train()
    torch.manual_seed(3)
    with torch.no_grad():
        log(torch.stack([model(x) for _ in range(4)]).std(0))
    model.eval()
    _see(model, x, log)


@idiom("images", "conv2d")
def _memory_format_of_weights(model: Any, x: torch.Tensor, log: Log) -> None:
    nn.utils.convert_conv2d_weight_memory_format(model, torch.channels_last)
    _see(model, x.to(memory_format=torch.channels_last), log)
    _see(model, x, log)


@idiom("conv1d", "conv2d", "conv2d_norm", "images")
def _strides_of_answers(model: Any, x: torch.Tensor, log: Log) -> None:
    """Code that comes after a model calls view on its answers."""
    with torch.no_grad():
        out = model(x)
        log(out.view(-1), out.view(out.size(0), -1))
        log([part.view(-1) for part in out.unbind(0)])


@idiom("encoder", "images", "linear", "lstm")
def _ensemble_of_copies(model: Any, x: torch.Tensor, log: Log) -> None:
    models = [copy.deepcopy(model) for _ in range(3)]
    for i, m in enumerate(models):
        for p in m.parameters():
            p.data.mul_(1 + 0.1 * i)
    with torch.no_grad():
        log([m(x) for m in models], model(x))
    if isinstance(model, nn.Sequential):
        parameters, buffers = torch.func.stack_module_state(models)
        base = copy.deepcopy(models[0]).to("meta")
        log(
            torch.func.vmap(lambda p, b: torch.func.functional_call(base, (p, b), (x,)))(
                parameters, buffers
            )
        )


@idiom("encoder", "images")
def _parts_copied(model: Any, x: torch.Tensor, log: Log) -> None:
    if hasattr(model, "layers"):
        model.layers = nn.ModuleList([copy.deepcopy(model.layers[0]) for _ in range(3)])
        model.layers[1].up.weight.data.mul_(0.5)
    else:
        model.blocks = nn.Sequential(*[copy.deepcopy(model.blocks[0]) for _ in range(3)])
        model.blocks[2].bn1.weight.data.mul_(0.5)
    _see(model, x, log)
    _train(model, x, log, model.parameters(), 2)
    _see(model, x, log)


@idiom("encoder")
def _part_of_an_optimized_model_in_a_new_one(model: Any, x: torch.Tensor, log: Log) -> None:
    class New(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.body, self.head = model.layers[0], nn.Linear(12, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(x).mean(1))

    new = New()
    _see(new, x, log)
    _train(new, x, log, new.parameters())
    _see(new, x, log)
    _see(model, x, log)


@idiom("encoder", "images")
def _early_exit(model: Any, x: torch.Tensor, log: Log) -> None:
    """A hook that stops the call by an exception."""

    class StopHere(Exception):
        pass

    kept: list[torch.Tensor] = []

    def stop(m: nn.Module, a: Any, out: torch.Tensor) -> None:
        kept.append(out)
        raise StopHere

    part = model.layers[0] if hasattr(model, "layers") else model.blocks[0].conv1
    handle = part.register_forward_hook(stop)
    for _ in range(2):
        try:
            with torch.no_grad():
                model(x)
        except StopHere:
            log("stopped")
    handle.remove()
    log(kept)
    _see(model, x, log)


@idiom("encoder", "images")
def _modules_walked(model: Any, x: torch.Tensor, log: Log) -> None:
    """Summaries: names, types, extra_repr, counts, buffers."""
    log([n for n, _ in model.named_modules()], [type(m).__name__ for m in model.modules()])
    log([m.extra_repr() for m in model.modules()], str(model) == repr(model), len(str(model)))
    log([n for n, _ in model.named_buffers()], sum(b.numel() for b in model.buffers()))
    log([n for n, _ in model.named_children()], model.training, sorted(model.state_dict()))
    log(sum(p.numel() for p in model.parameters() if p.requires_grad), model.state_dict()._metadata)
    log([m.__class__.__module__ for m in model.modules()], [*model.__dict__["_modules"]])
    log([callable(m.forward) for m in model.modules()], type(model).forward is not None)
    import inspect
    import typing

    log([str(inspect.signature(m.forward)) for m in model.modules()])
    log([str(inspect.getfullargspec(m.forward)) for m in model.modules()])
    log([str(typing.get_type_hints(m.forward)) for m in model.modules()])
    log([inspect.getsource(m.forward) for m in model.modules()])
    log([inspect.ismethod(type(m).forward) for m in model.modules()], hash(model) == id(model))


@idiom("encoder", "linear")
def _written_while_iterating(model: Any, x: torch.Tensor, log: Log) -> None:
    for i in range(4):
        _see(model, x * (i + 1), log)
        with torch.no_grad():
            for p in model.parameters():
                if p.dim() > 1:
                    p[i % p.shape[0]] = 0
                    p[:, 0].add_(0.1)
                    p.view(-1)[-1] = 2.0
    _see(model, x, log)


@idiom("encoder", "linear", "conv2d_norm")
def _perturbed_and_restored(model: Any, x: torch.Tensor, log: Log) -> None:
    """Evolution strategies, SAM: noise is added, used and taken back."""
    originals = [p.data.clone() for p in model.parameters()]
    for i in range(2):
        torch.manual_seed(i)
        for p in model.parameters():
            p.data.add_(torch.randn_like(p) * 0.1)
        _see(model, x, log)
        for p, o in zip(model.parameters(), originals, strict=True):
            p.data = o.clone()
        _see(model, x, log)


@idiom("encoder", "linear", "lstm")
def _quantized_dynamically_and_back(model: Any, x: torch.Tensor, log: Log) -> None:
    for p in model.parameters():
        scale = p.data.abs().max() / 127
        p.data.div_(scale).round_().clamp_(-127, 127).mul_(scale)
    _see(model, x, log)


@idiom("encoder", "images")
def _distributed_checkpoint(model: Any, x: torch.Tensor, log: Log) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    with tempfile.TemporaryDirectory() as folder:
        dcp.save(get_model_state_dict(model), checkpoint_id=folder)
        for p in model.parameters():
            p.data.zero_()
        state = get_model_state_dict(model)
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(model, state)
    _see(model, x, log)


@idiom("linear", "encoder")
def _fully_sharded(model: Any, x: torch.Tensor, log: Log) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    with tempfile.NamedTemporaryFile() as file:
        dist.init_process_group("gloo", init_method=f"file://{file.name}", rank=0, world_size=1)
        try:
            mesh = dist.init_device_mesh("cpu", (1,))
            fully_shard(model, mesh=mesh)
            _see(model, x, log)
            _train(model, x, log, model.parameters(), 2)
        finally:
            dist.destroy_process_group()


@idiom("linear", "encoder")
def _inference_server(model: Any, x: torch.Tensor, log: Log) -> None:
    """The same model in threads, in inference mode, with batches of any size."""
    from concurrent.futures import ThreadPoolExecutor

    @torch.inference_mode()
    def serve(n: int) -> torch.Tensor:
        return model(torch.cat([x] * n))

    with ThreadPoolExecutor(3) as pool:
        log([value.clone() for value in pool.map(serve, [1, 2, 3, 1, 4, 2, 1, 5])])


@idiom("linear", "images")
def _state_through_numpy(model: Any, x: torch.Tensor, log: Log) -> None:
    """Federated averaging: weights travel as arrays."""
    arrays = [value.cpu().numpy() for value in model.state_dict().values()]
    averaged = [a * 0.5 if a.dtype.kind == "f" else a for a in arrays]
    keys = model.state_dict().keys()
    model.load_state_dict({k: torch.tensor(v) for k, v in zip(keys, averaged, strict=True)})
    _see(model, x, log)


@idiom("linear", "conv2d_norm", "lstm", "tied")
def _from_a_file_that_is_mapped(model: Any, x: torch.Tensor, log: Log) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights"
        torch.save(
            {
                k: v.clone() * 0.5 if v.is_floating_point() else v.clone()
                for k, v in model.state_dict().items()
            },
            path,
        )
        model.load_state_dict(torch.load(path, mmap=True), assign=True)
        _see(model, x, log)
        os.unlink(path)
        _see(model, x, log)


@idiom("linear", "encoder")
def _jit_of_a_part(model: Any, x: torch.Tensor, log: Log) -> None:
    if hasattr(model, "layers"):
        model.layers[0].act = torch.jit.script(nn.GELU())
        model.head = torch.jit.trace(model.head, torch.randn(2, 5, 12))
    else:
        model[1] = torch.jit.script(model[1])
    _see(model, x, log)


@idiom("linear", "encoder", "images")
def _optimized_again_after_undo(model: Any, x: torch.Tensor, log: Log) -> None:
    import oxytorch
    from oxytorch.optimize import PASSES

    if getattr(model, "__dict__", None) and any("oxytorch" in key for key in model.__dict__):
        oxytorch.undo(model)
        log(len(PASSES) > 0)
        _see(model, x, log)
        model = oxytorch.optimize(model, sample_input=x, inplace=True)
    else:
        log(True)
        _see(model, x, log)
    _see(model, x, log)
    _train(model, x, log, model.parameters(), 2)
    _see(model, x, log)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [*IDIOMS])
def test_idiom(check: Callable[..., None], name: str, form: str) -> None:
    network, function = IDIOMS[name]
    check_named(check, network, function, form)
