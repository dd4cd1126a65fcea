"""The optimized model in the hands of PyTorch's other parts, and moved, copied and stored."""

from __future__ import annotations

import copy
import io
import pickle
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from .compare import Log
from .models import MODELS
from .registers import into

OFTEN = ("linear", "conv2d_norm", "lstm", "tied", "gated", "encoder", "images", "quantized")
LONG_OFTEN = ("linear", "conv2d_norm", "lstm", "quantized")
NOT_QUANTIZED = ("distributed_data_parallel", "autocast_of_a_part")
"""Ways that write values which 8 bits do not hold, or whose inputs only quantized layers take."""
NOT_IN_PROGRAMS = ("swapped_conversion",)
"""What torch refuses for tensors that guards of a program hold (docs/graph.md)."""
FORMS = ["default", *(pytest.param(f, marks=pytest.mark.slow) for f in ("sample", "program"))]
Way = Callable[[Any, torch.Tensor, Log], None]
WAYS: dict[str, Way] = {}
LONG_WAYS: dict[str, Way] = {}

way = into(WAYS)
"""Registers one way of using a model."""
long_way = into(LONG_WAYS)
"""Registers a way that takes seconds."""


def _first(value: Any) -> torch.Tensor:
    return value[0] if isinstance(value, tuple) else value


# Autocast


def _autocast(dtype: torch.dtype, mode: Callable[[], Any]) -> Way:
    def use(model: Any, x: torch.Tensor, log: Log) -> None:
        with mode(), torch.autocast("cpu", dtype=dtype):
            log(model(x), model(x))
        with mode():
            log(model(x))

    return use


for _name, _dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
    WAYS[f"autocast_{_name}"] = _autocast(_dtype, torch.no_grad)
    WAYS[f"autocast_{_name}_gradients"] = _autocast(_dtype, torch.enable_grad)
    WAYS[f"autocast_{_name}_inference"] = _autocast(_dtype, torch.inference_mode)


@way
def _autocast_backward(model: Any, x: torch.Tensor, log: Log) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = _first(model(x)).float().pow(2).mean()
    loss.backward()
    log(loss.dtype, [None if p.grad is None else p.grad.dtype for p in model.parameters()])


@way
def _autocast_nested(model: Any, x: torch.Tensor, log: Log) -> None:
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        log(model(x))
        with torch.autocast("cpu", enabled=False):
            log(model(x))
        log(model(x))


@way
def _autocast_of_a_part(model: Any, x: torch.Tensor, log: Log) -> None:
    """One part computes in bfloat16, by a wrapped forward."""
    part = next(m for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d, nn.LSTM)))
    inner = part.forward

    def forward(*args: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return inner(*args)

    part.forward = forward
    with torch.no_grad():
        log(_first(model(x)).float() * 0 if isinstance(part, nn.LSTM) else model(x))


# Modes


@way
def _inference_mode(model: Any, x: torch.Tensor, log: Log) -> None:
    with torch.inference_mode():
        result = model(x)
        log(_first(result).is_inference(), result, model(x))
    with torch.no_grad():
        log(model(x))
    log(model(x))


@way
def _deterministic(model: Any, x: torch.Tensor, log: Log) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with torch.no_grad():
            log(model(x), model(x))
        _first(model(x)).sum().backward()
        log([p.grad for p in model.parameters()])
    finally:
        torch.use_deterministic_algorithms(False)


@way
def _default_dtype_double(model: Any, x: torch.Tensor, log: Log) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad():
            log(model(x), model(x))
        log(model(x))
        log(model.state_dict())
        with torch.no_grad():
            log(copy.deepcopy(model)(x))
    finally:
        torch.set_default_dtype(torch.float32)


@way
def _default_device(model: Any, x: torch.Tensor, log: Log) -> None:
    with torch.device("meta"), torch.no_grad():
        log(model(x))
    with torch.device("cpu"), torch.no_grad():
        log(model(x), model(x))


@way
def _tensor_modes(model: Any, x: torch.Tensor, log: Log) -> None:
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import FlopCounterMode

    class Quiet(TorchFunctionMode):
        def __torch_function__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return f(*args, **(kwargs or {}))

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return f(*args, **(kwargs or {}))

    with torch.no_grad():
        with Quiet():
            log(model(x), model(x))
        with Watching():
            log(model(x), model(x))
        with FlopCounterMode(display=False) as counter:
            log(model(x))
        log(counter.get_total_flops())


@way
def _fake_tensors(model: Any, x: torch.Tensor, log: Log) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        result = _first(model(mode.from_tensor(x)))
        log(tuple(result.shape), result.dtype, type(result).__name__)


@way
def _profiler(model: Any, x: torch.Tensor, log: Log) -> None:
    with torch.no_grad(), torch.profiler.profile() as profile:
        log(model(x))
    log(len(profile.events()) > 0)


@way
def _mkldnn_off(model: Any, x: torch.Tensor, log: Log) -> None:
    with torch.no_grad(), torch.backends.mkldnn.flags(enabled=False):
        log(model(x), model(x))
    with torch.no_grad():
        log(model(x))


@way
def _flush_denormal_and_precision(model: Any, x: torch.Tensor, log: Log) -> None:
    torch.set_float32_matmul_precision("highest")
    with torch.no_grad():
        log(model(x))


@way
def _gradients_disabled_for_good(model: Any, x: torch.Tensor, log: Log) -> None:
    torch.set_grad_enabled(False)
    try:
        log(model(x), model(x))
    finally:
        torch.set_grad_enabled(True)
    log(model(x))


# Copies and stores


def _again(log: Log, model: Any, other: Any, x: torch.Tensor) -> None:
    """Log that a copy answers alike, lives by itself and can be written to."""
    with torch.no_grad():
        log(model(x), other(x), other(x), other.state_dict())
        for p in other.parameters():
            p.mul_(0.5)
        log(other(x), model(x))
    _first(other(x)).sum().backward()
    log([p.grad for p in other.parameters()], [p.grad for p in model.parameters()])
    log(other.training, [name for name, _ in other.named_parameters()])


@way
def _deepcopy(model: Any, x: torch.Tensor, log: Log) -> None:
    _again(log, model, copy.deepcopy(model), x)


@way
def _copy_of_a_copy(model: Any, x: torch.Tensor, log: Log) -> None:
    other = copy.deepcopy(model)
    del model
    _again(log, other, copy.deepcopy(other), x)


@way
def _shallow_copy(model: Any, x: torch.Tensor, log: Log) -> None:
    other = copy.copy(model)
    with torch.no_grad():
        log(model(x), other(x))
        for p in model.parameters():
            p.mul_(0.5)
        log(model(x), other(x))


@way
def _pickled(model: Any, x: torch.Tensor, log: Log) -> None:
    _again(log, model, pickle.loads(pickle.dumps(model)), x)


@way
def _saved_model(model: Any, x: torch.Tensor, log: Log) -> None:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    _again(log, model, torch.load(file, weights_only=False), x)


@way
def _saved_and_mapped(model: Any, x: torch.Tensor, log: Log) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt"
        torch.save(model.state_dict(), path)
        state = torch.load(path, mmap=True)
        log([type(v).__name__ for v in state.values()], state)
        model.load_state_dict(state)
        with torch.no_grad():
            log(model(x))
        model.load_state_dict(state, assign=True)
        with torch.no_grad():
            log(model(x), model(x))


@way
def _saved_state(model: Any, x: torch.Tensor, log: Log) -> None:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    log(len(file.getvalue()) > 100)
    file.seek(0)
    state = torch.load(file)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        log(model(x), model.load_state_dict(state).missing_keys, model(x))


@way
def _loaded_into_stock(model: Any, x: torch.Tensor, log: Log) -> None:
    """The state goes to a stock model of the same class and comes back."""
    name = next(
        n for n, m in MODELS.items() if type(m[0]()) is type(model) and _fits(m[0](), model)
    )
    stock = MODELS[name][0]()
    log(stock.load_state_dict(model.state_dict()).missing_keys)
    with torch.no_grad():
        log(stock(x))
        for p in stock.parameters():
            p.mul_(0.5)
        model.load_state_dict(stock.state_dict())
        log(model(x))


def _fits(one: nn.Module, other: nn.Module) -> bool:
    shapes = [{k: v.shape for k, v in m.state_dict().items()} for m in (one, other)]
    return shapes[0] == shapes[1]


@way
def _safetensors(model: Any, x: torch.Tensor, log: Log) -> None:
    from safetensors.torch import load, load_model, save, save_model

    state = {k: v.clone() for k, v in model.state_dict().items()}
    log(dict(sorted(load(save(state)).items())))
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "m.safetensors")
        save_model(model, path)
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
            log(model(x))
            log(load_model(model, path))
            log(model(x))


@way
def _safetensors_of_the_state(model: Any, x: torch.Tensor, log: Log) -> None:
    from safetensors.torch import load, save

    log(dict(sorted(load(save(model.state_dict())).items())))


@way
def _numpy_of_the_state(model: Any, x: torch.Tensor, log: Log) -> None:
    arrays = {k: v.numpy().copy() for k, v in model.state_dict().items()}
    log({k: torch.from_numpy(v) for k, v in arrays.items() if v.ndim})
    log([float(p.detach().cpu().numpy().sum()) for p in model.parameters()])
    log(
        [p.tolist() for p in model.parameters()][:1],
        [p.data_ptr() != 0 for p in model.parameters()],
    )


@way
def _looked_at(model: Any, x: torch.Tensor, log: Log) -> None:
    """What programs ask weights for."""
    with torch.no_grad():
        log(model(x))
    for name, p in model.named_parameters():
        log(name, p.shape, p.dtype, p.device.type, p.is_leaf, p.numel(), p.dim(), p.ndim, p.nbytes)
        log(
            p.stride(),
            p.is_contiguous(),
            p.storage_offset(),
            p.element_size(),
            p.layout == torch.strided,
        )
        log(p.untyped_storage().nbytes(), p.norm(), p.abs().max().item(), p[0], p.sum(0), p.T.shape)
        log(isinstance(p, nn.Parameter), isinstance(p, torch.Tensor), bool((p == p.clone()).all()))
        log(p.detach().reshape(-1)[:2], p.cpu() is p, p.to(torch.float32) is p, p.float() is p)
        log(
            p.to(torch.float64),
            torch.equal(p, p.clone()),
            torch.allclose(p, p * 1),
            hash(p) == id(p),
        )
        log(len(p), p.tolist()[0] if p.dim() == 1 else 0, p.requires_grad, p.grad is None)
    log(sum(p.numel() * p.element_size() for p in model.parameters()))
    log(torch.nn.utils.parameters_to_vector(model.parameters()))
    log(len({p.data_ptr() for p in model.parameters()}), len({*model.parameters()}))


@way
def _shown(model: Any, x: torch.Tensor, log: Log) -> None:
    log(len(repr(model)) > 5, [len(str(p.data)) > 9 for p in model.parameters()])
    log(f"{next(model.parameters())[0]}"[:6], str(model.state_dict())[:11])


# Moves


def _conversion(convert: Callable[[Any], Any], dtype: torch.dtype) -> Way:
    def use(model: Any, x: torch.Tensor, log: Log) -> None:
        model = convert(model)
        values = x.to(dtype) if x.is_floating_point() else x
        with torch.no_grad():
            log(model(values), model(values), model.state_dict())
        model = model.float()
        with torch.no_grad():
            log(model(x), model(x))

    return use


WAYS["half"] = _conversion(lambda m: m.half(), torch.float16)
WAYS["double"] = _conversion(lambda m: m.double(), torch.float64)
WAYS["bfloat16"] = _conversion(lambda m: m.bfloat16(), torch.bfloat16)
WAYS["to_dtype"] = _conversion(lambda m: m.to(torch.bfloat16), torch.bfloat16)
WAYS["to_dtype_and_device"] = _conversion(lambda m: m.to("cpu", torch.float64), torch.float64)
WAYS["to_same"] = _conversion(lambda m: m.to("cpu").float().cpu(), torch.float32)
WAYS["type"] = _conversion(lambda m: m.type(torch.float64), torch.float64)


@way
def _part_to_double(model: Any, x: torch.Tensor, log: Log) -> None:
    part = next(m for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d, nn.LSTM)))
    part.double()
    try:
        with torch.no_grad():
            log(model(x))
    except Exception as error:
        log(error)
    part.float()
    with torch.no_grad():
        log(model(x))


@way
def _to_meta(model: Any, x: torch.Tensor, log: Log) -> None:
    state = copy.deepcopy(model.state_dict())
    model.to("meta")
    log([p.device.type for p in model.parameters()])
    with torch.no_grad():
        log(model(x.to("meta")))
    model.to_empty(device="cpu")
    model.load_state_dict(state)
    with torch.no_grad():
        log(model(x))


@way
def _to_channels_last(model: Any, x: torch.Tensor, log: Log) -> None:
    if x.dim() == 4:
        model.to(memory_format=torch.channels_last)
        x = x.to(memory_format=torch.channels_last)
        with torch.no_grad():
            log(model(x), model(x.contiguous()), _first(model(x)).stride())


@way
def _swapped_conversion(model: Any, x: torch.Tensor, log: Log) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.double()
        with torch.no_grad():
            log(model(x.double() if x.is_floating_point() else x))
        model.load_state_dict({k: v * 1 for k, v in model.state_dict().items()})
        model.float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    with torch.no_grad():
        log(model(x))


@way
def _overwritten_conversion(model: Any, x: torch.Tensor, log: Log) -> None:
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        model.double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    with torch.no_grad():
        log(model(x.double() if x.is_floating_point() else x))


# Training helpers


@way
def _averaged(model: Any, x: torch.Tensor, log: Log) -> None:
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    for average in (
        AveragedModel(model),
        AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5)),
    ):
        for factor in (0.5, 0.8):
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(factor)
            average.update_parameters(model)
            with torch.no_grad():
                log(average(x), model(x))


@way
def _data_parallel(model: Any, x: torch.Tensor, log: Log) -> None:
    parallel = nn.DataParallel(model)
    with torch.no_grad():
        log(parallel(x), parallel(x), [*parallel.state_dict()])


@way
def _distributed_data_parallel(model: Any, x: torch.Tensor, log: Log) -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    with tempfile.NamedTemporaryFile() as file:
        dist.init_process_group("gloo", init_method=f"file://{file.name}", rank=0, world_size=1)
        try:
            parallel = DistributedDataParallel(model)
            with torch.no_grad():
                log(parallel(x), parallel(x))
            optimizer = torch.optim.SGD(parallel.parameters(), lr=0.05)
            _first(parallel(x)).pow(2).sum().backward()
            log([p.grad for p in parallel.parameters()])
            optimizer.step()
            with torch.no_grad():
                log(parallel(x))
                for p in model.parameters():
                    dist.broadcast(p.data, 0)
                    dist.all_reduce(p.data.mul_(0.5))
                log(parallel(x))
            # A thread of Gloo's that still holds a tensor waits for the GIL, and the end of the
            # group, which holds the GIL, waits for the thread.
            dist.barrier()
            del parallel
        finally:
            dist.destroy_process_group()


@way
def _shared_memory(model: Any, x: torch.Tensor, log: Log) -> None:
    model.share_memory()
    with torch.no_grad():
        log(model(x), [p.is_shared() for p in model.parameters()])
        for p in model.parameters():
            p.mul_(0.5)
        log(model(x), model.state_dict())


# Recording by torch


def _compiled(backend: str, fullgraph: bool, dynamic: bool | None = None) -> Way:
    def use(model: Any, x: torch.Tensor, log: Log) -> None:
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=backend, fullgraph=fullgraph, dynamic=dynamic)
        with torch.no_grad():
            log(compiled(x), compiled(x), compiled(torch.cat([x, x])))
            for p in model.parameters():
                p.mul_(0.5)
            log(compiled(x), model(x))
        _first(compiled(x)).sum().backward()
        log([p.grad for p in model.parameters()])
        torch._dynamo.reset()

    return use


LONG_WAYS["compile_aot_eager"] = _compiled("aot_eager", False)
LONG_WAYS["compile_aot_eager_fullgraph"] = _compiled("aot_eager", True)
LONG_WAYS["compile_aot_eager_dynamic"] = _compiled("aot_eager", True, True)
LONG_WAYS["compile_inductor"] = _compiled("inductor", False)
LONG_WAYS["compile_inductor_fullgraph"] = _compiled("inductor", True)


@long_way
def _compile_eager(model: Any, x: torch.Tensor, log: Log) -> None:
    _compiled("eager", True)(model, x, log)


@contextmanager
def _new_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@long_way
def _compile_method(model: Any, x: torch.Tensor, log: Log) -> None:
    with _new_compiler():
        model.compile(backend="aot_eager")
        with torch.no_grad():
            log(model(x), model(x))


@long_way
def _compile_a_part(model: Any, x: torch.Tensor, log: Log) -> None:
    with _new_compiler():
        for name, child in [*model.named_children()]:
            if not isinstance(child, nn.ModuleList):
                setattr(model, name, torch.compile(child, backend="aot_eager"))
        with torch.no_grad():
            log(model(x), model(x))


@long_way
def _count_of_graphs(model: Any, x: torch.Tensor, log: Log) -> None:
    with _new_compiler():
        with torch.no_grad():
            explained = torch._dynamo.explain(model)(x)
        log(explained.graph_count, explained.graph_break_count)


def _exported(strict: bool, dynamic: bool = False) -> Way:
    def use(model: Any, x: torch.Tensor, log: Log) -> None:
        shapes = ({0: torch.export.Dim("batch", min=2)},) if dynamic else None
        with torch.no_grad():
            program = torch.export.export(model, (x,), strict=strict, dynamic_shapes=shapes)
            log(program.module()(x), sorted(program.state_dict))
            if dynamic:
                log(program.module()(torch.cat([x, x])))
            file = io.BytesIO()
            torch.export.save(program, file)
            file.seek(0)
            log(torch.export.load(file).module()(x), model(x))

    return use


LONG_WAYS["export"] = _exported(False)
LONG_WAYS["export_strict"] = _exported(True)
LONG_WAYS["export_dynamic"] = _exported(False, True)


def _after_trace(way: Way) -> Way:
    def use(model: Any, x: torch.Tensor, log: Log) -> None:
        with torch.no_grad():
            traced = torch.jit.trace(model, (x,))
        way(model, x, log)
        log(traced(x))

    return use


LONG_WAYS["trace_then_export"] = _after_trace(LONG_WAYS["export"])
LONG_WAYS["trace_then_export_strict"] = _after_trace(LONG_WAYS["export_strict"])
LONG_WAYS["trace_then_compile"] = _after_trace(LONG_WAYS["compile_aot_eager"])


@long_way
def _trace(model: Any, x: torch.Tensor, log: Log) -> None:
    for mode in (torch.no_grad, torch.enable_grad):
        with mode():
            traced = torch.jit.trace(model, (x,))
            file = io.BytesIO()
            torch.jit.save(traced, file)
            file.seek(0)
            loaded = torch.jit.load(file)
            log(traced(x), loaded(x), loaded(torch.cat([x, x])), sorted(loaded.state_dict()))
    frozen = torch.jit.freeze(traced.eval())
    with torch.no_grad():
        log(frozen(x), model(x))


@long_way
def _script(model: Any, x: torch.Tensor, log: Log) -> None:
    scripted = torch.jit.script(model)
    with torch.no_grad():
        file = io.BytesIO()
        torch.jit.save(scripted, file)
        file.seek(0)
        log(scripted(x), torch.jit.load(file)(x), model(x))


@long_way
def _symbolic_trace(model: Any, x: torch.Tensor, log: Log) -> None:
    traced = torch.fx.symbolic_trace(model)
    with torch.no_grad():
        log(traced(x), model(x))


@long_way
def _make_fx(model: Any, x: torch.Tensor, log: Log) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch.no_grad():
        log(make_fx(lambda v: _first(model(v)))(x)(x))


@long_way
def _onnx_export(model: Any, x: torch.Tensor, log: Log) -> None:
    pytest.importorskip("onnx")
    with torch.no_grad():
        file = io.BytesIO()
        torch.onnx.export(model, (x,), file, dynamo=False)
        log(len(file.getvalue()) > 100)


@long_way
def _quantized_dynamically(model: Any, x: torch.Tensor, log: Log) -> None:
    quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    with torch.no_grad():
        log(quantized(x), model(x))


@long_way
def _aot_function(model: Any, x: torch.Tensor, log: Log) -> None:
    from functorch.compile import aot_function, nop

    log(aot_function(lambda v: _first(model(v)), fw_compiler=nop, bw_compiler=nop)(x))


def _cases(ways: dict[str, Way], often: tuple[str, ...]) -> list[Any]:
    slow = ("compile_inductor", "compile_inductor_fullgraph", "compile_eager", "compile_aot_eager")
    return [
        pytest.param(
            name,
            way_name,
            id=f"{name}-{way_name}",
            marks=pytest.mark.slow if name not in often or way_name in slow else (),
        )
        for way_name in ways
        for name in MODELS
        if name != "quantized" or way_name not in NOT_QUANTIZED
    ]


def _check(check: Callable[..., None], name: str, used: Way, form: str) -> None:
    build, sample, own_form = MODELS[name]

    def use(model: Any, log: Log) -> None:
        x = sample()
        with torch.no_grad():
            log(model(x), model(x))
        used(model, x, log)

    check(build, use, own_form if form == "default" else form, sample)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("name", "way"), _cases(WAYS, OFTEN))
def test_composition(check: Callable[..., None], name: str, way: str, form: str) -> None:
    if form == "program" and (way in NOT_IN_PROGRAMS or name == "quantized"):
        pytest.skip("not served by programs")
    _check(check, name, WAYS[way], form)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "way"), _cases(LONG_WAYS, LONG_OFTEN))
def test_recorded_by_torch(check: Callable[..., None], name: str, way: str) -> None:
    _check(check, name, LONG_WAYS[way], "default")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", ["sample", "program"])
@pytest.mark.parametrize(("name", "way"), _cases(LONG_WAYS, ("linear", "conv2d_norm", "encoder")))
def test_recorded_by_torch_after_sample(
    check: Callable[..., None], name: str, way: str, form: str
) -> None:
    _check(check, name, LONG_WAYS[way], form)
