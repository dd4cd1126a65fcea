"""What a region stands for stays what it was, or the module's own code runs."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oxytorch
from oxytorch.optimize import DEFAULT

pytestmark = pytest.mark.usefixtures("pack_small_layers")

WIDTH = 16
PASSES = [DEFAULT, ("program", *DEFAULT)]
both_ways = pytest.mark.parametrize("passes", PASSES, ids=["default", "program"])


class Block(nn.Module):
    """Has a product with an activation, an addition with a norm, and what does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.drop = nn.Dropout(0.2)
        self.tap = nn.Identity()
        self.prepare()

    def prepare(self) -> None:
        """For subclasses."""

    def core(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(x + self.drop(self.down(self.tap(F.gelu(self.up(x))))))
        return found

    def forward(self, x: Tensor) -> Tensor:
        return self.core(x)


def sample() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(8, WIDTH)


def same(stock: nn.Module, ours: nn.Module, *args: Any) -> None:
    with torch.no_grad():
        torch.manual_seed(1)
        expected = stock(*args)
        torch.manual_seed(1)
        found = ours(*args)
        assert type(found) is type(expected) and found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def check(
    build: Callable[[], nn.Module],
    passes: tuple[str, ...] = DEFAULT,
    change: Callable[[nn.Module], object] = lambda model: None,
    given: Callable[[], tuple[Any, ...]] = lambda: (sample(),),
    later: Callable[[], tuple[Any, ...]] | None = None,
) -> nn.Module:
    """Optimize a model, change it as the stock one, and compare."""
    torch.manual_seed(0)
    stock = build().eval()
    args = given()
    ours = oxytorch.optimize(stock, sample_input=args, passes=passes)
    same(stock, ours, *args)
    for model in (stock, ours):
        change(model)
    for _ in range(2):
        same(stock, ours, *(args if later is None else later()))
    return ours


def double_input(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (args[0] * 2, *args[1:])


def double_output(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


@both_ways
@pytest.mark.parametrize("path", ["", "0", "0.up", "0.norm", "0.drop", "0.tap"])
@pytest.mark.parametrize("kind", ["pre", "pre_keywords", "post", "post_first", "both"])
def test_hooks_of_before_are_called_once(kind: str, path: str, passes: tuple[str, ...]) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(Block(), Block())
        module = model.get_submodule(path)
        if kind in ("pre", "both"):
            module.register_forward_pre_hook(double_input)
        if kind == "pre_keywords":
            module.register_forward_pre_hook(
                lambda m, args, kwargs: (double_input(m, args), kwargs), with_kwargs=True
            )
        if kind in ("post", "both"):
            module.register_forward_hook(double_output)
        if kind == "post_first":
            module.register_forward_hook(double_output, prepend=True)
        return model

    def remove(model: nn.Module) -> None:
        module = model.get_submodule(path)
        module._forward_pre_hooks.clear()
        module._forward_hooks.clear()

    check(build, passes)
    check(build, passes, remove)


@both_ways
def test_hooks_that_only_look_are_called(passes: tuple[str, ...]) -> None:
    seen: list[str] = []
    model = nn.Sequential(Block()).eval()
    for name, module in model.named_modules():
        module.register_forward_hook(lambda m, a, out, name=name: seen.append(name))
    ours = oxytorch.optimize(model, sample_input=(sample(),), passes=passes)
    with torch.no_grad():
        seen.clear()
        model(sample())
        expected = [*seen]
        seen.clear()
        ours(sample())
    assert seen == expected


def test_hooks_for_all_modules_are_called_once() -> None:
    handle = nn.modules.module.register_module_forward_hook(
        lambda m, a, out: out * 2 if isinstance(m, nn.Linear) else None
    )
    try:
        check(lambda: nn.Sequential(Block()))
    finally:
        handle.remove()


def test_weight_norm_may_be_removed() -> None:
    def build() -> nn.Module:
        model = Block()
        nn.utils.weight_norm(model.down)
        return model

    check(build, change=lambda model: nn.utils.remove_weight_norm(model.down))  # type: ignore[arg-type]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Calls the elements of a list, as a transformer whose norms come first."""

    def __init__(self, kind: type = nn.ModuleList) -> None:
        super().__init__()
        layers = [Layer(), Layer(), Layer()]
        named = {f"l{number}": layer for number, layer in enumerate(layers)}
        given: Any = {nn.ModuleDict: [named], nn.ModuleList: [layers]}.get(kind, layers)
        self.layers = kind(*given)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        values = self.layers.values() if isinstance(self.layers, nn.ModuleDict) else self.layers
        for layer in values:
            x = layer(x)
        return self.norm(x)


class Doubled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.inner(x)


def swap(model: Any) -> None:
    model.layers[0], model.layers[2] = model.layers[2], model.layers[0]


LIST_CHANGES: dict[str, Callable[[Any], object]] = {
    "replace": lambda m: m.layers.__setitem__(0, nn.Identity()),
    "wrap": lambda m: m.layers.__setitem__(1, Doubled(m.layers[1])),
    "delete": lambda m: m.layers.__delitem__(1),
    "append": lambda m: m.layers.append(nn.Tanh()),
    "insert": lambda m: m.layers.insert(1, nn.Tanh()),
    "swap": swap,
    "pop": lambda m: m.layers.pop(0),
    "set_submodule": lambda m: m.set_submodule("layers.1", nn.Tanh()),
    "slice": lambda m: setattr(m, "layers", m.layers[:2]),
}


@both_ways
@pytest.mark.parametrize("change", LIST_CHANGES)
@pytest.mark.parametrize("kind", [nn.ModuleList, nn.Sequential])
def test_lists_of_modules_may_change(kind: type, change: str, passes: tuple[str, ...]) -> None:
    check(lambda: Stack(kind), passes, LIST_CHANGES[change])


@both_ways
def test_dictionaries_of_modules_may_change(passes: tuple[str, ...]) -> None:
    for change in (
        lambda m: m.layers.__setitem__("l1", nn.Tanh()),
        lambda m: m.layers.pop("l0"),
        lambda m: m.layers.update({"new": nn.Tanh()}),
    ):
        check(lambda: Stack(nn.ModuleDict), passes, change)


class Late(Block):
    """Has parts that are set later."""

    def prepare(self) -> None:
        self.register_parameter("scale", None)
        self.register_buffer("shift", None)
        self.adapters = nn.ModuleDict()
        self.table = nn.ParameterDict()
        self.rows = nn.ParameterList()

    def forward(self, x: Tensor) -> Tensor:
        y = self.core(x)
        if self.scale is not None:
            y = y * self.scale
        if self.shift is not None:
            y = y + self.shift
        if "x" in self.adapters:
            y = self.adapters["x"](y)
        if "x" in self.table:
            y = y * self.table["x"]
        for row in self.rows:
            y = y + row
        return y


LATE: dict[str, Callable[[Any], object]] = {
    "parameter": lambda m: setattr(m, "scale", nn.Parameter(torch.full((WIDTH,), 2.0))),
    "buffer": lambda m: setattr(m, "shift", torch.ones(WIDTH)),
    "moduledict": lambda m: m.adapters.__setitem__("x", nn.Tanh()),
    "parameterdict": lambda m: m.table.__setitem__("x", nn.Parameter(torch.full((WIDTH,), 3.0))),
    "parameterlist": lambda m: m.rows.append(nn.Parameter(torch.ones(WIDTH))),
}


@both_ways
@pytest.mark.parametrize("change", LATE)
def test_what_was_none_may_be_set(change: str, passes: tuple[str, ...]) -> None:
    check(Late, passes, LATE[change])


def test_what_was_set_may_become_none() -> None:
    class Model(Late):
        def prepare(self) -> None:
            super().prepare()
            self.scale = nn.Parameter(torch.full((WIDTH,), 2.0))
            self.shift = torch.ones(WIDTH)

    check(Model, change=lambda m: setattr(m, "scale", None))
    check(Model, change=lambda m: setattr(m, "shift", None))


class Cross(Block):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.core(x) if x is y else self.core(x) + self.core(y)


class InList(Block):
    def forward(self, x: list[Tensor]) -> Tensor:
        return self.core(x[0]) if x[0] is x[1] else self.core(x[0]) + self.core(x[1])


@both_ways
def test_tensors_that_are_one_are_a_form_of_their_own(passes: tuple[str, ...]) -> None:
    x, y = sample(), torch.ones(8, WIDTH)
    for first, second in (((x, x), (x, y)), ((x, y), (x, x)), ((x, y), (y, y))):
        check(Cross, passes, given=lambda f=first: f, later=lambda s=second: s)
        check(InList, passes, given=lambda f=first: ([*f],), later=lambda s=second: ([*s],))


def test_a_module_that_is_given_a_buffer_may_be_given_other_tensors() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()
            self.register_buffer("table", torch.randn(8, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            table: Tensor = self.block(self.table)
            return x + table

    torch.manual_seed(0)
    stock = Model().eval()
    ours: Any = oxytorch.optimize(stock, sample_input=sample())
    same(stock, ours, sample())
    same(stock.block, ours.block, sample())


class Reads(Block):
    """Returns something else where a fact of the process or of its input is another."""

    def __init__(self, fact: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.fact = fact

    def forward(self, x: Tensor) -> Tensor:
        return self.core(x) * float(self.fact(x))


def fact(name: str) -> tuple[Callable[[Tensor], Any], Callable[[Any], object]]:
    threads = torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    return {
        "default_dtype": (
            lambda x: 1 + (torch.get_default_dtype() == torch.float64),
            lambda undo: torch.set_default_dtype(torch.float32 if undo else torch.float64),
        ),
        "deterministic": (
            lambda x: 1 + torch.are_deterministic_algorithms_enabled(),
            lambda undo: torch.use_deterministic_algorithms(not undo),
        ),
        "threads": (
            lambda x: torch.get_num_threads(),
            lambda undo: torch.set_num_threads(threads if undo else threads + 1),
        ),
        "precision": (
            lambda x: len(torch.get_float32_matmul_precision()),
            lambda undo: torch.set_float32_matmul_precision(precision if undo else "medium"),
        ),
    }[name]


@both_ways
@pytest.mark.parametrize("name", ["default_dtype", "deterministic", "threads", "precision"])
def test_facts_of_the_process_may_change(name: str, passes: tuple[str, ...]) -> None:
    read, switch = fact(name)
    torch.manual_seed(0)
    stock, x = Reads(read).eval(), sample()
    ours = oxytorch.optimize(stock, sample_input=x, passes=passes)
    same(stock, ours, x)
    switch(False)
    try:
        same(stock, ours, x)
    finally:
        switch(True)


@both_ways
def test_facts_of_the_input_are_part_of_the_form(passes: tuple[str, ...]) -> None:
    x = sample()
    for read in (lambda x: 1 + x.requires_grad, lambda x: 1 + isinstance(x, nn.Parameter)):
        for first, second in ((x, nn.Parameter(x)), (nn.Parameter(x), x)):
            check(
                lambda read=read: Reads(read), passes, given=lambda f=first: (f,),
                later=lambda s=second: (s,),
            )  # fmt: skip


@both_ways
def test_an_input_that_was_written_to(passes: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    stock, x = Reads(lambda x: 1 + x._version).eval(), sample()
    ours = oxytorch.optimize(stock, sample_input=x, passes=passes)
    same(stock, ours, x)
    x.mul_(1)
    same(stock, ours, x)


class ActiveDropout(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.drop.train()
        y = self.core(x)
        self.drop.eval()
        return y


class Seeded(Block):
    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(7)
        return self.core(x) + torch.randn(WIDTH)


class Restored(Block):
    def forward(self, x: Tensor) -> Tensor:
        state = torch.get_rng_state()
        noise = torch.randn(WIDTH)
        torch.set_rng_state(state)
        return self.core(x) + noise - torch.randn(WIDTH)


class OwnCall(nn.Linear):
    def __call__(self, x: Tensor) -> Tensor:
        return 2 * super().__call__(x)  # type: ignore[no-any-return]


class WithOwnCall(Block):
    def prepare(self) -> None:
        self.up = OwnCall(WIDTH, WIDTH)


class OwnBlockCall(nn.Module):
    def __init__(self) -> None:
        super().__init__()

        class Called(Block):
            def __call__(self, x: Tensor, factor: float) -> Tensor:
                return super().__call__(x * factor)  # type: ignore[no-any-return]

        self.block = Called()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.block(x, 3.0)
        return y.relu()


@both_ways
@pytest.mark.parametrize("build", [ActiveDropout, Seeded, Restored, WithOwnCall, OwnBlockCall])
def test_what_a_record_does_not_show_runs_as_it_is(
    build: type[nn.Module], passes: tuple[str, ...]
) -> None:
    ours = check(build, passes)
    if build is ActiveDropout:
        x = sample()
        with torch.no_grad():
            assert not torch.equal(ours(x), ours(x))


def test_a_call_that_only_passes_on_keeps_the_region_of_its_caller() -> None:
    class Passing(Block):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs)

    class Caller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.norm = Passing(), nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x + self.block(x))  # type: ignore[no-any-return]

    ours = check(Caller)
    assert "" in {e.module for e in oxytorch.explain(ours).applied if "layer_norm" in e.detail}


def planar() -> tuple[Any, ...]:
    torch.manual_seed(0)
    return (torch.randn(2, 8, 12, 12),)


class Convolutions(nn.Module):
    def __init__(self, middle: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.first = nn.Conv2d(8, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 16, 3, padding=1)
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first(x))
        found = self.middle(y)
        return self.second(y if found is None else found)  # type: ignore[no-any-return]


def write_rows(y: Tensor) -> None:
    y.contiguous()[:, 0] = 0


def write_every_other(y: Tensor) -> None:
    y.reshape(-1)[::2] = 0


def strided_for_large_batches(y: Tensor) -> Tensor:
    if y.shape[0] > 2:
        return torch.as_strided(y, (3, 16, 6, 6), (16 * 144, 144, 24, 2))
    return y


ORDERS: dict[str, Callable[[Tensor], Any]] = {
    "flatten": lambda y: y.flatten(1).mul_(2.0) is None or None,
    "contiguous": write_rows,
    "reshape": write_every_other,
    "rand_like": lambda y: y + torch.rand_like(y),
    "dropout": lambda y: F.dropout(y, 0.5, training=True),
    "strides": strided_for_large_batches,
}


@pytest.mark.parametrize("name", ORDERS)
def test_code_that_depends_on_the_order_in_memory(name: str) -> None:
    build = lambda: Convolutions(ORDERS[name])  # noqa: E731
    check(build, given=planar)
    check(build, given=planar, later=lambda: (torch.cat([*planar(), *planar()])[:3],))


def test_copies_follow_their_own_lists() -> None:
    ours = oxytorch.optimize(Stack().eval(), sample_input=sample())
    other: Any = copy.deepcopy(ours)
    expected = copy.deepcopy(oxytorch.undo(copy.deepcopy(ours)))
    other.layers[0] = nn.Tanh()
    expected.layers[0] = nn.Tanh()  # type: ignore[index, operator]
    same(expected, other, sample())


def _helper(x: Tensor, scale: float = 1.0) -> Tensor:
    return x * scale


def _other_helper(x: Tensor, scale: float = 1.0) -> Tensor:
    return x * scale + 1


class CallsHelper(Block):
    def core(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(x + _helper(self.down(F.gelu(self.up(x)))))
        return found


@pytest.mark.parametrize(
    ("function", "name", "value"),
    [
        (_helper, "__code__", _other_helper.__code__),
        (_helper, "__defaults__", (2.0,)),
        (CallsHelper.core, "__code__", Block.core.__code__),
        (Block.forward, "__code__", CallsHelper.core.__code__),
    ],
)
def test_functions_changed_in_place_are_followed(
    function: Callable[..., Any], name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    stock, x = CallsHelper().eval(), sample()
    ours = oxytorch.optimize(stock, sample_input=x)
    same(stock, ours, x)
    monkeypatch.setattr(function, name, value)
    same(stock, ours, x)
    monkeypatch.undo()
    same(stock, ours, x)


class Long(Block):
    """Makes many large tensors, one after the other; its arguments have names of generated code."""

    def forward(self, v1: Tensor, r2: Tensor) -> Tensor:  # type: ignore[override]
        x = v1
        for _ in range(12):
            x = F.gelu(self.up(x)) + r2
        return x


def test_a_region_keeps_no_more_tensors_than_the_code() -> None:
    alive: list[int] = []

    class Counts(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            made.extend([weakref.ref(result)] if isinstance(result, Tensor) else [])
            alive.append(sum(ref() is not None for ref in made))
            return result

    torch.manual_seed(0)
    stock, x = Long().eval(), sample()
    call = {"v1": x, "r2": torch.randn(8, WIDTH)}
    ours = oxytorch.optimize(stock, sample_input=call)
    program = ours.__dict__["forward"].programs[0]
    with torch.no_grad():
        torch.testing.assert_close(program.run((), call), stock(**call))
    most = []
    for run in (lambda: stock(**call), lambda: program.run((), call)):
        made: list[Any] = []
        alive.clear()
        with torch.no_grad(), Counts():
            run()
        most.append(max(alive))
    assert most[1] <= most[0] + 1


class Squares(nn.Module):
    """Operators whose functions pickle does not find by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.gelu(self.first(x)) ** 2
        return 1 - (2 / (F.relu(self.second(y)) + 1)) + 2 ** (0 - y)


def test_operators_of_tensors_are_found_again_in_a_file() -> None:
    model, x = Squares().eval(), torch.randn(4, 16)
    optimized = oxytorch.optimize(model, sample_input=x)
    copied = pickle.loads(pickle.dumps(optimized))
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(copied(x), model(x))
    programs = [
        p for m in copied.modules() for p in getattr(m.__dict__.get("forward"), "programs", ())
    ]
    assert any("TensorBase.pow" in repr(p.scope) for p in programs)


class ReplacesBuffers(nn.Module):
    """Its old buffers are freed while it runs, and the tensors made next may get their identity."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(8):
            self.register_buffer(f"mean{number}", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> list[Tensor]:
        for number in range(8):
            setattr(self, f"mean{number}", x.mean(0) + number)
        return [x + number for number in range(8)]


class UsesReplaced(Block):
    def prepare(self) -> None:
        self.part = ReplacesBuffers()

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        made = self.part(F.gelu(self.up(x)))
        again = self.part(self.core(x))
        return [*made, *again]


@both_ways
def test_buffers_that_are_replaced_are_not_taken_for_what_comes_after(passes: Any) -> None:
    torch.manual_seed(0)
    stock, x = UsesReplaced().eval(), sample()
    ours = oxytorch.optimize(stock, sample_input=x, passes=passes)
    with torch.no_grad():
        for _ in range(3):
            for one, other in zip(ours(x), stock(x), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_order_of_layers_is_followed() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Sigmoid(), nn.Linear(16, 16)).eval()
    x = torch.randn(4, 16)
    optimized = oxytorch.optimize(model, sample_input=x)
    for _ in range(2):
        for each in (model, optimized):
            each._modules["0"] = each._modules.pop("0")
        with torch.no_grad():
            torch.testing.assert_close(optimized(x), model(x))
