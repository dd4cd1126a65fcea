"""What the documentation of transformers and of PEFT does with a model."""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from .compare import Log
from .registers import into_of
from .transformers_models import MODELS, loss_of, see, token_ids, train

transformers = pytest.importorskip("transformers")

Idiom = Callable[[Any, dict[str, torch.Tensor], Log], None]
IDIOMS: dict[str, tuple[str, Idiom]] = {}


EVERY = (*MODELS,)

idiom = into_of(IDIOMS)
"""Registers something that users do with these models, whose names it is given."""


@idiom(*EVERY)
def _answers(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    with torch.no_grad():
        result = model(**inputs)
        log(type(result), [*result], result.logits, result[0], result.to_tuple()[0], len(result))
        log(
            model(**inputs, return_dict=False)[0], model(**inputs, output_hidden_states=True).keys()
        )
        hidden = model(**inputs, output_hidden_states=True)
        log(getattr(hidden, "hidden_states", getattr(hidden, "encoder_hidden_states", None)))


@idiom("bert", "gpt2", "llama", "t5", "vit")
def _attentions(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    model.set_attn_implementation("eager")
    with torch.no_grad():
        result = model(**inputs, output_attentions=True)
        log(getattr(result, "attentions", getattr(result, "encoder_attentions", None)))
    model.set_attn_implementation("sdpa")
    see(model, inputs, log)


@idiom(*EVERY)
def _training_mode_and_back(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    model.train()
    torch.manual_seed(4)
    train(model, inputs, log)
    model.eval()
    see(model, inputs, log)


@idiom("bert", "vit", "resnet")
def _labels(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    result = model(**inputs, labels=torch.tensor([0, 2]))
    result.loss.backward()
    log(result.loss, [p.grad for p in model.parameters()])


@idiom("gpt2", "llama", "t5")
def _language_labels(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    given = {k: v for k, v in inputs.items() if "decoder" not in k}
    labels = token_ids(2, 4) if "decoder_input_ids" in inputs else inputs["input_ids"]
    result = model(**given, labels=labels)
    result.loss.backward()
    log(result.loss, [p.grad for p in model.parameters()])


@idiom(*EVERY)
def _saved_and_loaded(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        other = type(model).from_pretrained(folder).eval()
    see(other, inputs, log)
    log(dict(other.state_dict().items()))
    see(model, inputs, log)


@idiom("gpt2", "llama", "t5")
def _generated(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    ids = inputs["input_ids"][:1]
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "pad_token_id": 0}
    log(model.generate(ids, do_sample=False, **options))
    log(model.generate(ids, do_sample=False, use_cache=False, **options))
    log(model.generate(ids, do_sample=False, num_beams=3, **options))
    torch.manual_seed(5)
    log(model.generate(ids, do_sample=True, top_k=10, **options))
    out = model.generate(
        ids, do_sample=False, output_scores=True, return_dict_in_generate=True, **options
    )
    log(out.sequences, [*out.scores])


@idiom("gpt2", "llama")
def _cache_by_hand(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    ids, past = inputs["input_ids"][:1], None
    with torch.no_grad():
        for _ in range(4):
            out = model(ids if past is None else ids[:, -1:], past_key_values=past, use_cache=True)
            past = out.past_key_values
            log(out.logits[:, -1], past.get_seq_length())
            ids = torch.cat([ids, out.logits[:, -1:].argmax(-1)], -1)
    log(ids)


@idiom("gpt2", "llama", "bert")
def _embeddings_given(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    result = model(inputs_embeds=embeds * 1, attention_mask=inputs["attention_mask"])
    result.logits.sum().backward()
    log(result.logits, model.get_input_embeddings().weight.grad)


@idiom("gpt2", "llama", "bert", "t5")
def _vocabulary_resized(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    torch.manual_seed(5)
    model.resize_token_embeddings(103, mean_resizing=False)
    head = model.get_output_embeddings()
    log(model.get_input_embeddings().weight.shape, None if head is None else head.weight.shape)
    with torch.no_grad():
        model.get_input_embeddings().weight[99:].fill_(0.1)
        if head is not None:
            head.weight[99:].fill_(0.1)
    see(model, inputs, log)


@idiom("gpt2", "llama", "t5")
def _head_exchanged(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    torch.manual_seed(5)
    model.set_output_embeddings(nn.Linear(32, 99, bias=False))
    see(model, inputs, log)
    model.tie_weights()
    see(model, inputs, log)


@idiom("bert", "vit", "resnet")
def _classifier_exchanged(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    torch.manual_seed(5)
    head = model.classifier
    if isinstance(head, nn.Sequential):
        head[-1] = nn.Linear(head[-1].in_features, 7)
    else:
        model.classifier = nn.Linear(32, 7)
    model.num_labels = model.config.num_labels = 7
    for p in model.base_model.parameters():
        p.requires_grad_(False)
    see(model, inputs, log)
    train(model, inputs, log)
    see(model, inputs, log)


@idiom("bert", "vit", "llama", "gpt2")
def _gradient_checkpointing(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    model.gradient_checkpointing_enable()
    model.train()
    torch.manual_seed(4)
    loss_of(model, inputs).backward()
    log([p.grad for p in model.parameters()])
    model.eval()
    model.gradient_checkpointing_disable()
    see(model, inputs, log)


@idiom(*EVERY)
def _asked_for(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    log(model.dtype, str(model.device), model.num_parameters(), model.num_parameters(True))
    log(model.get_memory_footprint() > 0, len(str(model)), model.config.model_type)
    log(model.base_model_prefix, type(model.base_model).__name__, sorted(model.state_dict()))
    log(
        [n for n, _ in model.named_parameters()],
        model.floating_point_ops({**inputs, "input_ids": token_ids()}),
    )


@idiom("bert", "llama")
def _configuration_changed(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    model.config.output_hidden_states = True
    with torch.no_grad():
        log(model(**inputs).hidden_states)
    model.config.output_hidden_states = False
    if hasattr(model, "model"):
        model.model.norm.variance_epsilon = 0.5
        see(model, inputs, log)


@idiom("llama")
def _inputs_of_other_forms(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    ids = inputs["input_ids"]
    with torch.no_grad():
        for given in (
            {"input_ids": ids},
            {"input_ids": ids, "position_ids": torch.arange(7)[None] + 3},
            {"input_ids": ids[:, :1]},
            {"input_ids": ids, "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1, 1]] * 2)},
            {"input_ids": ids, "logits_to_keep": 1},
            {"input_ids": ids, "use_cache": False},
            {"input_ids": ids.int()},
        ):
            log(model(**given).logits, model(**given).logits)
        log(model(ids).logits, model(ids, inputs["attention_mask"])[0])


@idiom("bert")
def _positional_and_types(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    with torch.no_grad():
        log(model(inputs["input_ids"]).logits, model(inputs["input_ids"], inputs["attention_mask"]))
        log(model(**inputs, token_type_ids=torch.ones(2, 7, dtype=torch.long)).logits)
        log(model.bert(**inputs).pooler_output, model.bert.encoder.layer[0](torch.ones(1, 3, 32)))


def _lora_targets(model: Any) -> list[tuple[str, nn.Module]]:
    wanted = ("query", "value", "q_proj", "v_proj", "q", "v", "c_attn", "down_proj", "up_proj")
    return [(n, m) for n, m in model.named_modules() if n.rpartition(".")[2] in wanted]


class Lora(nn.Module):
    """The layer of PEFT: base_layer, lora_A, lora_B, merged or not."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base_layer = base
        rows, columns = base.weight.shape
        self.transposed = not isinstance(base, nn.Linear)
        if self.transposed:
            rows, columns = columns, rows
        self.lora_A = nn.ModuleDict({"default": nn.Linear(columns, 4, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(4, rows, bias=False)})
        self.merged = self.disabled = False

    @property
    def weight(self) -> torch.Tensor:
        return self.base_layer.weight

    def delta(self) -> torch.Tensor:
        product = self.lora_B["default"].weight @ self.lora_A["default"].weight
        return product.T if self.transposed else product

    def merge(self, sign: float) -> None:
        self.base_layer.weight.data += sign * self.delta()
        self.merged = sign > 0

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = self.base_layer(x, *args, **kwargs)
        if self.disabled or self.merged:
            return result
        return result + self.lora_B["default"](self.lora_A["default"](x))


def _with_lora(model: Any) -> list[Lora]:
    torch.manual_seed(6)
    model.requires_grad_(False)
    layers = []
    for name, module in _lora_targets(model):
        layer = Lora(module)
        model.set_submodule(name, layer)
        layers.append(layer)
    return layers


@idiom("bert", "gpt2", "llama", "t5")
def _lora(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    layers = _with_lora(model.eval())
    log(len(layers))
    see(model, inputs, log)
    train(model, inputs, log)
    see(model, inputs, log)
    for layer in layers:
        layer.disabled = True
    see(model, inputs, log)
    for layer in layers:
        layer.disabled = False
        layer.merge(1)
    see(model, inputs, log)
    for layer in layers:
        layer.merge(-1)
    see(model, inputs, log)


@idiom("bert", "llama")
def _lora_unloaded(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    for layer in _with_lora(model):
        layer.merge(1)
    for name, module in [*model.named_modules()]:
        if isinstance(module, Lora):
            model.set_submodule(name, module.base_layer)
    see(model, inputs, log)


@idiom("bert", "llama")
def _scaled_activations(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    """IA3: an output is scaled by a vector, through a hook."""
    vectors = []
    for _name, module in _lora_targets(model):
        vector = nn.Parameter(torch.full((module.weight.shape[0],), 0.7))
        vectors.append(vector)
        module.register_forward_hook(lambda m, a, out, v=vector: out * v)
    see(model, inputs, log)
    loss_of(model, inputs).backward()
    log([v.grad for v in vectors])


@idiom("llama", "gpt2")
def _steering(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    """A vector is added to the hidden states of one layer, and taken away again."""
    layers = model.model.layers if hasattr(model, "model") else model.transformer.h

    def add(m: nn.Module, args: Any, out: Any) -> Any:
        return (out[0] + 0.5, *out[1:]) if isinstance(out, tuple) else out + 0.5

    see(model, inputs, log)
    handle = layers[0].register_forward_hook(add)
    see(model, inputs, log)
    log(
        model.generate(
            inputs["input_ids"][:1],
            max_new_tokens=4,
            min_new_tokens=4,
            do_sample=False,
            pad_token_id=0,
        )
    )
    handle.remove()
    see(model, inputs, log)


@idiom("llama", "bert")
def _layers_dropped(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    if hasattr(model, "model"):
        model.model.layers = model.model.layers[:1]
        model.config.num_hidden_layers = 1
    else:
        model.bert.encoder.layer = model.bert.encoder.layer[:1]
    see(model, inputs, log)


@idiom("llama", "bert", "vit", "resnet")
def _cast_and_moved(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    model = model.to(torch.bfloat16)
    given = {k: v.bfloat16() if v.is_floating_point() else v for k, v in inputs.items()}
    with torch.no_grad():
        log(model(**given).logits, model.dtype)
    model = model.to(torch.float32).to("cpu")
    see(model, inputs, log)


@idiom("bert", "vit")
def _autocast(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        log(model(**inputs).logits)
    see(model, inputs, log)


@idiom("bert", "gpt2", "vit")
def _trainer_step(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    """What Trainer does in one step: train mode, clipping, schedule, zero_grad."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 1, 4)
    model.train()
    for step in range(3):
        torch.manual_seed(step)
        loss = loss_of(model, inputs)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        model.zero_grad()
        log(loss, norm)
    see(model.eval(), inputs, log)


@idiom("bert")
def _pooled_sentences(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    body = model.base_model
    with torch.no_grad():
        for rows in (1, 2, 1):
            given = {k: v[:rows] for k, v in inputs.items()}
            hidden = body(**given).last_hidden_state
            mask = given["attention_mask"][..., None].float()
            pooled = (hidden * mask).sum(1) / mask.sum(1)
            log(torch.nn.functional.normalize(pooled), type(body(**given)))


@idiom("bert", "llama")
def _copied_layers(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    """A teacher's layers go to a smaller student."""
    student = copy.deepcopy(model)
    if hasattr(student, "model"):
        student.model.layers = nn.ModuleList([copy.deepcopy(model.model.layers[1])])
    else:
        student.bert.encoder.layer = nn.ModuleList([copy.deepcopy(model.bert.encoder.layer[1])])
    see(student, inputs, log)
    train(student, inputs, log)
    see(student, inputs, log)
    see(model, inputs, log)


@idiom("gpt2", "llama")
def _perplexity(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    ids = token_ids(1, 40)
    total = 0.0
    with torch.no_grad():
        for begin in range(0, 30, 10):
            window = ids[:, begin : begin + 10]
            total += float(model(window, labels=window).loss)
    log(math.exp(total / 3))


def _cases() -> Iterator[Any]:
    for number, (name, (_network, _)) in enumerate(IDIOMS.items()):
        for form in ("default", "sample", "program"):
            late = form == "program" or (form == "sample") == bool(number % 2)
            yield pytest.param(
                name, form, id=f"{name}-{form}", marks=pytest.mark.slow if late else ()
            )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "form"), _cases())
def test_transformers_idiom(check: Callable[..., None], name: str, form: str) -> None:
    network, function = IDIOMS[name]
    build, inputs = MODELS[network]

    def use(model: Any, log: Log) -> None:
        see(model, inputs(), log)
        function(model, inputs(), log)

    check(build, use, form, inputs, tolerance=3e-5)
