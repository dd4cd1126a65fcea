"""A split weight is one weight: whoever reads, writes, copies or takes it meets the float32 one."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import oxytorch
from oxytorch import optim
from oxytorch.optim.split_parameter import SplitParameter
from split_models import assert_weights, network, pair, step, weights

pytestmark = pytest.mark.usefixtures("pack_small_layers")

# Averages. Each function makes an average of a model, moves it, and says how it stands.

DECAY = 0.9


class _ByStateDictionary:
    """As timm and many others do."""

    def __init__(self, model: nn.Module) -> None:
        self.average = copy.deepcopy(model)

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        own, other = self.average.state_dict().values(), model.state_dict().values()
        for mean, value in zip(own, other, strict=True):
            mean.copy_(DECAY * mean + (1 - DECAY) * value)

    def values(self) -> list[Tensor]:
        return [*self.average.state_dict().values()]


class _ByParameters(_ByStateDictionary):
    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for mean, value in zip(self.average.parameters(), model.parameters(), strict=True):
            mean.lerp_(value, 1 - DECAY)


class _ByData(_ByStateDictionary):
    def update(self, model: nn.Module) -> None:
        for mean, value in zip(self.average.parameters(), model.parameters(), strict=True):
            mean.data.mul_(DECAY).add_(value.data, alpha=1 - DECAY)


class _ByLists(_ByStateDictionary):
    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        torch._foreach_lerp_([*self.average.parameters()], [*model.parameters()], 1 - DECAY)


class _ByShadows:
    """As torch_ema and diffusers: clones that are not in any module."""

    def __init__(self, model: nn.Module) -> None:
        self.means = [parameter.clone().detach() for parameter in model.parameters()]

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for mean, value in zip(self.means, model.parameters(), strict=True):
            mean.sub_((1 - DECAY) * (mean - value))

    def values(self) -> list[Tensor]:
        return self.means


class _ByTorch(_ByStateDictionary):
    def __init__(self, model: nn.Module) -> None:
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
        self.averaged, self.average = averaged, averaged.module
        averaged.update_parameters(model)

    def update(self, model: nn.Module) -> None:
        self.averaged.update_parameters(model)


class _ByDictionaryLoaded(_ByStateDictionary):
    def update(self, model: nn.Module) -> None:
        state, other = self.average.state_dict(), model.state_dict()
        means = {key: DECAY * state[key] + (1 - DECAY) * other[key] for key in state}
        self.average.load_state_dict(means)


AVERAGES = [
    _ByStateDictionary,
    _ByParameters,
    _ByData,
    _ByLists,
    _ByShadows,
    _ByTorch,
    _ByDictionaryLoaded,
]


@pytest.mark.parametrize("kind", AVERAGES)
def test_averages_are_those_of_float32(kind: Any) -> None:
    model, optimizer = pair()
    average = kind(model)
    wanted = [value.clone() for value in weights(model).values()]
    for seed in range(6):
        step(model, optimizer, seed=seed)
        average.update(model)
        for mean, value in zip(wanted, weights(model).values(), strict=True):
            mean.mul_(DECAY).add_(value, alpha=1 - DECAY)
    for mean, value in zip(average.values(), wanted, strict=True):
        assert mean.dtype == torch.float32
        torch.testing.assert_close(mean, value, rtol=1e-6, atol=1e-7)


def test_an_average_computes_and_takes_the_place_of_the_weights() -> None:
    model, optimizer = pair()
    average = copy.deepcopy(model)
    step(model, optimizer)
    x = torch.randn(4, 6)
    assert (average(x).float() - model(x).float()).abs().max() > 1e-3
    model.load_state_dict(average.state_dict())
    torch.testing.assert_close(average(x).float(), model(x).float(), rtol=0.05, atol=0.02)
    assert_weights(model, average.state_dict())


@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        lambda model: pickle.loads(pickle.dumps(model)),
        lambda model: torch.load(_saved(model), weights_only=False),
        lambda model: AveragedModel(model).module,
    ],
)
def test_copies_are_plain_float32(copied: Callable[[nn.Module], nn.Module]) -> None:
    model, optimizer = pair()
    step(model, optimizer)
    wanted = weights(model)
    plain = copied(model)
    assert {type(p) for p in plain.parameters()} == {nn.Parameter}
    assert {p.dtype for p in plain.parameters()} == {torch.float32}
    assert_weights(plain, wanted)
    stock = torch.optim.SGD(plain.parameters(), lr=0.1)
    step(plain, stock)
    assert not torch.equal(plain.state_dict()["head.weight"], wanted["head.weight"])
    assert_weights(model, wanted)
    plain.half()
    assert {p.dtype for p in plain.parameters()} == {torch.float16}


def _saved(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def test_a_saved_state_dictionary_is_of_plain_tensors() -> None:
    model, _ = pair()
    loaded = torch.load(_saved(model.state_dict()), weights_only=True)
    assert {type(value) for value in loaded.values()} == {Tensor}
    assert_weights(model, loaded)


# Writes. Each does the same to a stock parameter, whose value is wanted.

W = Any
WRITES: dict[str, Callable[[W], Any]] = {
    "ones_": nn.init.ones_,
    "uniform_": lambda w: nn.init.uniform_(w, generator=torch.Generator().manual_seed(1)),
    "fill_": lambda w: w.fill_(1 / 3),
    "copy_": lambda w: w.copy_(torch.full_like(w, 1 / 3, dtype=torch.float32)),
    "a small factor": lambda w: w.mul_(0.9999),
    "operator": lambda w: w.__imul__(0.9999),
    "clamp": lambda w: w.clamp_(-0.05, 0.05),
    "clip": lambda w: torch.clip(w, -0.05, 0.05, out=w),
    "item": lambda w: w.__setitem__(0, 1 / 3),
    "row": lambda w: w[0].fill_(1 / 3),
    "view": lambda w: w.view(-1)[:5].mul_(0.9999),
    "transposed": lambda w: w.t().mul_(0.9999),
    "data": lambda w: w.data.mul_(0.9999),
    "data of data": lambda w: w.data.data.mul_(0.9999),
    "data item": lambda w: w.data.__setitem__(0, 1 / 3),
    "data view": lambda w: w.data.view(-1)[3:].clamp_(-0.05, 0.05),
    "data set": lambda w: setattr(w, "data", torch.full((3, 8), 1 / 3)),
    "detach": lambda w: w.detach().mul_(0.9999),
    "foreach": lambda w: torch._foreach_mul_([w], 0.9999),
    "set_": lambda w: w.set_(torch.full((3, 8), 1 / 3)),
    "lerp_": lambda w: w.lerp_(torch.zeros(3, 8), 1e-4),
    "data copy_": lambda w: w.data.copy_(torch.full((3, 8), 1 / 3)),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("step_first", [False, True])
def test_what_is_written_is_the_weight(write: Callable[[W], Any], step_first: bool) -> None:
    model, optimizer = pair()
    if step_first:
        step(model, optimizer)
    plain = nn.Parameter(weights(model)["head.weight"])
    others = {name: value for name, value in weights(model).items() if name != "head.weight"}
    with torch.no_grad():
        write(model.head.weight)
        write(plain)
    assert type(model.head.weight) is SplitParameter
    assert torch.equal(model.state_dict()["head.weight"], plain)
    assert torch.equal(optimizer.master_weight(model.head.weight), plain)
    assert_weights(model, {**others, "head.weight": plain.detach()})
    # The next step goes on from there.
    model.head.weight.grad = torch.full((3, 8), 0.5, dtype=torch.bfloat16)
    plain.grad = torch.full((3, 8), 0.5)
    stock = optim.AdamW([plain], lr=1e-2)
    stock.load_state_dict(_state_of(optimizer, model.head.weight))
    optimizer.step()
    stock.step()
    assert torch.equal(model.state_dict()["head.weight"], plain)


def _state_of(optimizer: Any, parameter: Tensor) -> dict[str, Any]:
    """The optimizer's checkpoint as if it had nothing but the parameter."""
    whole = optimizer.state_dict()
    place = [own is parameter for own in optimizer.param_groups[0]["params"]].index(True)
    states = {0: whole["state"][place]} if place in whole["state"] else {}
    return {"state": states, "param_groups": [{**whole["param_groups"][0], "params": [0]}]}


def test_writes_to_a_state_dictionary_reach_the_model() -> None:
    model, optimizer = pair()
    wanted = {name: value * 0.9999 for name, value in weights(model).items()}
    for value in model.state_dict().values():
        value.mul_(0.9999)
    assert_weights(model, wanted)
    kept = model.state_dict()
    step(model, optimizer)
    # As with stock weights, it is the weights and no snapshot of them.
    wanted = {name: value * 2 for name, value in weights(model).items()}
    for value in kept.values():
        value.mul_(2)
    assert_weights(model, wanted)


def test_weights_are_set_aside_and_brought_back() -> None:
    model, optimizer = pair()
    step(model, optimizer)
    wanted = weights(model)
    backup = {name: parameter.data for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.data = torch.zeros(parameter.shape)
    assert all(not value.any() for value in model.state_dict().values())
    for name, parameter in model.named_parameters():
        parameter.data = backup[name]
    assert_weights(model, wanted)


def test_vectors_of_parameters() -> None:
    model, _ = pair()
    wanted = weights(model)
    vector = nn.utils.parameters_to_vector(model.parameters())
    assert vector.dtype == torch.float32
    nn.utils.vector_to_parameters(vector.detach() * 0.9999, model.parameters())
    assert_weights(model, {name: value * 0.9999 for name, value in wanted.items()})


def test_arrays_cannot_be_written() -> None:
    model, _ = pair()
    array = model.head.weight.detach().numpy()
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1.0


def test_a_write_without_no_grad_is_an_error_as_in_torch() -> None:
    model, _ = pair()
    with pytest.raises(RuntimeError, match=r"torch\.no_grad"):
        model.head.weight.mul_(2)


def test_penalties_see_whole_weights_and_give_gradients() -> None:
    model, _ = pair()
    plain = nn.Parameter(weights(model)["head.weight"])
    for weight in (model.head.weight, plain):
        weight.pow(2).sum().backward()
    assert model.head.weight.pow(2).sum() == plain.pow(2).sum()
    assert torch.equal(model.head.weight.grad, plain.grad.bfloat16())


def test_forwards_with_and_without_gradients_agree() -> None:
    model, optimizer = pair()
    step(model, optimizer)
    model.eval()
    x = torch.randn(4, 6)
    wanted = model(x)
    assert wanted.dtype == torch.bfloat16
    with torch.no_grad():
        assert torch.equal(model(x), wanted)
    with torch.inference_mode():
        assert torch.equal(model(x), wanted)
        assert torch.equal(model.head.weight + 0, weights(model)["head.weight"])
    values = {name: value.detach() for name, value in model.named_parameters()}
    torch.testing.assert_close(
        torch.func.functional_call(model, values, x).float(), wanted.float(), rtol=0.05, atol=0.02
    )


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_compiled_loop_is_the_plain_one(backend: str) -> None:
    if backend == "inductor":
        pytest.importorskip("torch._inductor")
    torch._dynamo.reset()
    (model, optimizer), (other, twin) = pair(), pair()
    step(torch.compile(model, backend=backend), optimizer)
    step(other, twin)
    for one, two in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(one, two, rtol=0.05, atol=0.02)

    @torch.compile(backend=backend)
    def loop(x: Tensor) -> None:
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    before = weights(model)
    loop(torch.randn(4, 6))
    assert not torch.equal(model.state_dict()["head.weight"], before["head.weight"])
    torch._dynamo.reset()


# What is held, and what joins.


def test_what_no_optimizer_holds_is_float32_and_joins_with_its_group() -> None:
    model, twin = network(), network()
    optimizer = torch.optim.AdamW(model.head.parameters(), lr=1e-2)
    model, optimizer = oxytorch.optimize(model, optimizer=optimizer, dtype=torch.bfloat16)
    assert model.head.weight.dtype == torch.bfloat16
    body = [*model.body.parameters(), model.projection]
    assert {parameter.dtype for parameter in body} == {torch.float32}
    found = model.body[0](torch.randn(2, 6))
    assert torch.equal(found, found.bfloat16().float())
    step(model, optimizer)
    assert torch.equal(model.body[0].weight, twin.body[0].weight)

    before = weights(model)
    optimizer.add_param_group({"params": body, "lr": 1e-4})
    assert model.body[0].weight.dtype == model.projection.dtype == torch.bfloat16
    assert model.body[1].weight.dtype == torch.float32
    assert_weights(model, before)
    for _ in range(3):
        step(model, optimizer)
    _assert_all_moved(model, before)


def _assert_all_moved(model: Any, before: dict[str, Tensor]) -> None:
    """Every weight has moved, by less than a bfloat16 could show where rates are small."""
    for name, value in model.state_dict().items():
        moved = (value - before[name]).abs().max()
        assert moved > 0, name
        if name.startswith("body"):
            assert moved < 1e-3, name


@pytest.mark.parametrize("joins", ["class", "optimize"])
def test_a_second_optimizer_joins(joins: str) -> None:
    model = network()
    head = torch.optim.AdamW(model.head.parameters(), lr=1e-2)
    model, head = oxytorch.optimize(model, optimizer=head, dtype=torch.bfloat16)
    body = [*model.body.parameters(), model.projection]
    if joins == "class":
        second: Any = optim.SGD(body, lr=1e-4, momentum=0.9)
    else:
        second = torch.optim.SGD(body, lr=1e-4, momentum=0.9)
        same, second = oxytorch.optimize(model, optimizer=second, inplace=True)
        assert same is model
    assert type(second) is optim.SGD
    assert {type(p) for p in model.head.parameters()} == {SplitParameter}
    assert type(model.body[0].weight) is SplitParameter
    before = weights(model)
    for _ in range(3):
        step(model, head, second)
    _assert_all_moved(model, before)
    oxytorch.undo(model)
    assert {type(p) for p in model.parameters()} == {nn.Parameter}


def test_one_more_optimizer_has_to_be_inplace() -> None:
    model, _optimizer = pair()
    second = torch.optim.SGD(model.head.parameters(), lr=0.1)
    for options in ({}, {"inplace": True, "dtype": {"": torch.bfloat16}}):
        with pytest.raises(ValueError, match="expected inplace=True and the same dtype or None"):
            oxytorch.optimize(model, optimizer=second, **options)
    for_inference = oxytorch.optimize(network().eval())
    third = torch.optim.SGD(for_inference.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="optimized for inference; call"):
        oxytorch.optimize(for_inference, optimizer=third)


def test_a_layer_of_which_a_part_is_held_stays_float32() -> None:
    model = network()
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    model, optimizer = oxytorch.optimize(
        model, optimizer=torch.optim.SGD(biases, lr=0.1), dtype=torch.bfloat16
    )
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    before = weights(model)
    step(model, optimizer)
    assert torch.equal(model.state_dict()["head.weight"], before["head.weight"])
    assert not torch.equal(model.state_dict()["head.bias"], before["head.bias"])


@pytest.mark.parametrize("clear", ["clear", "assign", "pop"])
def test_states_that_are_cleared_take_no_bit_of_a_weight(clear: str) -> None:
    from collections import defaultdict

    for model, optimizer in (pair(), _split_alone()):
        step(model, optimizer)
        wanted = [optimizer.master_weight(p) for p in model.parameters()]
        if clear == "clear":
            optimizer.state.clear()
        elif clear == "assign":
            optimizer.state = defaultdict(dict)
        else:
            for parameter in model.parameters():
                optimizer.state.pop(parameter)
        found = [optimizer.master_weight(p) for p in model.parameters()]
        assert all(map(torch.equal, found, wanted))
        step(model, optimizer)
        for parameter, before in zip(model.parameters(), wanted, strict=True):
            after = optimizer.master_weight(parameter)
            # A first step of AdamW is as large as the rate, to more bits than 16.
            assert (after - before).abs().max() <= 1.1e-2
            assert not torch.equal(after, after.bfloat16().float()) or after.numel() < 9


def _split_alone() -> tuple[Any, Any]:
    """A bfloat16 model whose halves are the optimizer's business."""
    model = network().bfloat16()
    model.register_forward_pre_hook(lambda module, inputs: (inputs[0].bfloat16(),))
    return model, optim.AdamW(model.parameters(), lr=1e-2, master_weights="split")


@pytest.mark.parametrize("name", sorted(WRITES.keys() - {"data of data"}))
def test_what_is_written_counts_where_only_the_optimizer_splits(name: str) -> None:
    write = WRITES[name]
    model, optimizer = _split_alone()
    step(model, optimizer)
    weight = model.head.weight
    assert not torch.equal(optimizer.master_weight(weight), weight.float())
    plain = nn.Parameter(weight.detach().clone())
    with torch.no_grad():
        try:
            write(plain)
        except RuntimeError:
            pytest.skip("torch does not take it for bfloat16")
        if plain.dtype != torch.bfloat16:
            pytest.skip("it leaves bfloat16")
        write(weight)
    assert torch.equal(weight, plain)
    assert torch.equal(optimizer.master_weight(weight), plain.float())


def test_sparse_embeddings_are_left_and_trained() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(20, 6, sparse=True)
            self.rest = network()

        def forward(self, tokens: Tensor) -> Any:
            return self.rest(self.words(tokens))

    model = Words()
    stock = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = oxytorch.optimize(model, optimizer=stock, dtype=torch.bfloat16)
    assert model.words.weight.dtype == torch.float32
    assert model.rest.head.weight.dtype == torch.bfloat16
    assert "gradients are sparse" in str(oxytorch.explain(model))
    before = weights(model)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.tensor([1, 2, 3])).float().square().mean().backward()
        optimizer.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    after = model.state_dict()
    assert not torch.equal(after["words.weight"][1], before["words.weight"][1])
    assert torch.equal(after["words.weight"][0], before["words.weight"][0])
    assert not torch.equal(after["rest.head.weight"], before["rest.head.weight"])


@pytest.mark.parametrize("convert", ["half", "double", "bfloat16"])
@pytest.mark.parametrize("part", ["", "body", "head"])
def test_other_dtypes_are_refused_before_anything_is_converted(convert: str, part: str) -> None:
    model, _optimizer = pair()
    wanted, kinds = weights(model), [p.dtype for p in model.parameters()]
    with pytest.raises(TypeError, match=r"undo\(model\) makes its weights plain float32"):
        getattr(model.get_submodule(part), convert)()
    assert [p.dtype for p in model.parameters()] == kinds
    assert_weights(model, wanted)
    with pytest.raises(TypeError, match=r"undo\(model\)"):
        model.head.weight.data = torch.zeros(3, 8, dtype=torch.float64)
    assert_weights(model, wanted)
    oxytorch.undo(model)
    getattr(model, convert)()


@pytest.mark.parametrize(
    "convert", [lambda m: m.float(), lambda m: m.to("cpu"), lambda m: m.to(torch.float32)]
)
def test_float32_is_what_weights_are(convert: Any) -> None:
    model, optimizer = pair()
    wanted = weights(model)
    convert(model)
    assert_weights(model, wanted)
    step(model, optimizer)
    assert type(model.head.weight) is SplitParameter


def test_loading_by_assignment_keeps_every_bit() -> None:
    model, optimizer = pair()
    other, _ = pair()
    step(model, optimizer)
    wanted = weights(model)
    other.load_state_dict(wanted, assign=True)
    assert_weights(other, wanted)
    x = torch.randn(3, 6)
    torch.testing.assert_close(other(x).float(), model(x).float(), rtol=0.05, atol=0.02)


def test_the_pair_is_copied_as_a_pair() -> None:
    model, optimizer = pair()
    step(model, optimizer)
    for copied in (
        copy.deepcopy((model, optimizer)),
        pickle.loads(pickle.dumps((model, optimizer))),
    ):
        assert type(copied[0].head.weight) is SplitParameter
        assert copied[0].head.weight is copied[1].param_groups[0]["params"][-2]
        expected = copy.deepcopy((model, optimizer))
        step(*copied)
        step(*expected)
        assert_weights(copied[0], weights(expected[0]))
        # Splitting goes on where optimizers add groups.


def test_parameters_and_optimizers_are_given_up() -> None:
    import weakref

    model, optimizer = pair()
    step(model, optimizer)
    held = [weakref.ref(p) for p in itertools.chain(model.parameters(), [optimizer])]
    del model, optimizer
    gc.collect()
    assert all(reference() is None for reference in held)


def test_save_pretrained_names_the_dtype_that_it_writes(tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=20, num_hidden_layers=1, **sizes)
    model = transformers.BertModel(config)
    optimizer = torch.optim.AdamW(model.parameters())
    model, _ = oxytorch.optimize(model, optimizer=optimizer, dtype=torch.bfloat16)
    wanted = weights(model)
    model.save_pretrained(tmp_path)
    assert '"float32"' in (tmp_path / "config.json").read_text()
    loaded = transformers.BertModel.from_pretrained(tmp_path)
    assert_weights(loaded, wanted)
    assert model.dtype == torch.bfloat16
