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

from tiny import tiny

from .compare import Log
from .registers import into_of

transformers = pytest.importorskip("transformers")

Idiom = Callable[[Any, dict[str, torch.Tensor], Log], None]
IDIOMS: dict[str, tuple[str, Idiom]] = {}


def _ids(rows: int = 2, columns: int = 7) -> torch.Tensor:
    return torch.randint(5, 90, (rows, columns), generator=torch.Generator().manual_seed(3))


_SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
_TEXT = {"vocab_size": 99, "max_position_embeddings": 64}
_LABELS = {"num_labels": 3}


def bert() -> Any:
    return tiny("BertForSequenceClassification", **_SIZES, **_TEXT, **_LABELS)


def gpt2() -> Any:
    return tiny(
        "GPT2LMHeadModel", vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=64,
        eos_token_id=1, bos_token_id=2,
    )  # fmt: skip


def llama() -> Any:
    return tiny(
        "LlamaForCausalLM", **_SIZES, **_TEXT, num_key_value_heads=2, tie_word_embeddings=False,
        eos_token_id=1, bos_token_id=2, pad_token_id=0,
    )  # fmt: skip


def t5() -> Any:
    return tiny(
        "T5ForConditionalGeneration", vocab_size=99, d_model=32, d_kv=8, d_ff=48, num_layers=2,
        num_heads=4, decoder_start_token_id=0, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip


def vit() -> Any:
    return tiny("ViTForImageClassification", **_SIZES, **_LABELS, image_size=16, patch_size=4)


def resnet() -> Any:
    model = tiny(
        "ResNetForImageClassification", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1],
        layer_type="basic", **_LABELS,
    )  # fmt: skip
    with torch.no_grad():
        for m in model.modules():
            if isinstance(m, nn.BatchNorm2d):
                m.running_mean.normal_(0, 0.3)
                m.running_var.uniform_(0.5, 2)
    return model


def _image() -> torch.Tensor:
    return torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(3))


def _text() -> dict[str, torch.Tensor]:
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, 4:] = 0
    return {"input_ids": _ids(), "attention_mask": mask}


MODELS: dict[str, tuple[Callable[[], Any], Callable[[], dict[str, torch.Tensor]]]] = {
    "bert": (bert, _text),
    "gpt2": (gpt2, _text),
    "llama": (llama, _text),
    "t5": (t5, lambda: {**_text(), "decoder_input_ids": _ids(2, 4)}),
    "vit": (vit, lambda: {"pixel_values": _image()}),
    "resnet": (resnet, lambda: {"pixel_values": _image()}),
}
EVERY = (*MODELS,)

idiom = into_of(IDIOMS)
"""Registers something that users do with these models, whose names it is given."""


def _see(model: Any, inputs: dict[str, Any], log: Log) -> None:
    with torch.no_grad():
        result = model(**inputs)
        log(type(result), result.logits, model(**inputs).logits)


def _loss(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**inputs).logits.float().pow(2).mean()


def _train(model: Any, inputs: dict[str, torch.Tensor], log: Log, steps: int = 2) -> None:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    for _ in range(steps):
        loss = _loss(model, inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log(loss)


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
    _see(model, inputs, log)


@idiom(*EVERY)
def _training_mode_and_back(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    model.train()
    torch.manual_seed(4)
    _train(model, inputs, log)
    model.eval()
    _see(model, inputs, log)


@idiom("bert", "vit", "resnet")
def _labels(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    result = model(**inputs, labels=torch.tensor([0, 2]))
    result.loss.backward()
    log(result.loss, [p.grad for p in model.parameters()])


@idiom("gpt2", "llama", "t5")
def _language_labels(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    given = {k: v for k, v in inputs.items() if "decoder" not in k}
    labels = _ids(2, 4) if "decoder_input_ids" in inputs else inputs["input_ids"]
    result = model(**given, labels=labels)
    result.loss.backward()
    log(result.loss, [p.grad for p in model.parameters()])


@idiom(*EVERY)
def _saved_and_loaded(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        other = type(model).from_pretrained(folder).eval()
    _see(other, inputs, log)
    log(dict(other.state_dict().items()))
    _see(model, inputs, log)


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
    _see(model, inputs, log)


@idiom("gpt2", "llama", "t5")
def _head_exchanged(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    torch.manual_seed(5)
    model.set_output_embeddings(nn.Linear(32, 99, bias=False))
    _see(model, inputs, log)
    model.tie_weights()
    _see(model, inputs, log)


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
    _see(model, inputs, log)
    _train(model, inputs, log)
    _see(model, inputs, log)


@idiom("bert", "vit", "llama", "gpt2")
def _gradient_checkpointing(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    model.gradient_checkpointing_enable()
    model.train()
    torch.manual_seed(4)
    _loss(model, inputs).backward()
    log([p.grad for p in model.parameters()])
    model.eval()
    model.gradient_checkpointing_disable()
    _see(model, inputs, log)


@idiom(*EVERY)
def _asked_for(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    log(model.dtype, str(model.device), model.num_parameters(), model.num_parameters(True))
    log(model.get_memory_footprint() > 0, len(str(model)), model.config.model_type)
    log(model.base_model_prefix, type(model.base_model).__name__, sorted(model.state_dict()))
    log(
        [n for n, _ in model.named_parameters()],
        model.floating_point_ops({**inputs, "input_ids": _ids()}),
    )


@idiom("bert", "llama")
def _configuration_changed(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    model.config.output_hidden_states = True
    with torch.no_grad():
        log(model(**inputs).hidden_states)
    model.config.output_hidden_states = False
    if hasattr(model, "model"):
        model.model.norm.variance_epsilon = 0.5
        _see(model, inputs, log)


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
    _see(model, inputs, log)
    _train(model, inputs, log)
    _see(model, inputs, log)
    for layer in layers:
        layer.disabled = True
    _see(model, inputs, log)
    for layer in layers:
        layer.disabled = False
        layer.merge(1)
    _see(model, inputs, log)
    for layer in layers:
        layer.merge(-1)
    _see(model, inputs, log)


@idiom("bert", "llama")
def _lora_unloaded(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    for layer in _with_lora(model):
        layer.merge(1)
    for name, module in [*model.named_modules()]:
        if isinstance(module, Lora):
            model.set_submodule(name, module.base_layer)
    _see(model, inputs, log)


@idiom("bert", "llama")
def _scaled_activations(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    """IA3: an output is scaled by a vector, through a hook."""
    vectors = []
    for _name, module in _lora_targets(model):
        vector = nn.Parameter(torch.full((module.weight.shape[0],), 0.7))
        vectors.append(vector)
        module.register_forward_hook(lambda m, a, out, v=vector: out * v)
    _see(model, inputs, log)
    _loss(model, inputs).backward()
    log([v.grad for v in vectors])


@idiom("llama", "gpt2")
def _steering(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    """A vector is added to the hidden states of one layer, and taken away again."""
    layers = model.model.layers if hasattr(model, "model") else model.transformer.h

    def add(m: nn.Module, args: Any, out: Any) -> Any:
        return (out[0] + 0.5, *out[1:]) if isinstance(out, tuple) else out + 0.5

    _see(model, inputs, log)
    handle = layers[0].register_forward_hook(add)
    _see(model, inputs, log)
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
    _see(model, inputs, log)


@idiom("llama", "bert")
def _layers_dropped(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    if hasattr(model, "model"):
        model.model.layers = model.model.layers[:1]
        model.config.num_hidden_layers = 1
    else:
        model.bert.encoder.layer = model.bert.encoder.layer[:1]
    _see(model, inputs, log)


@idiom("llama", "bert", "vit", "resnet")
def _cast_and_moved(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    model = model.to(torch.bfloat16)
    given = {k: v.bfloat16() if v.is_floating_point() else v for k, v in inputs.items()}
    with torch.no_grad():
        log(model(**given).logits, model.dtype)
    model = model.to(torch.float32).to("cpu")
    _see(model, inputs, log)


@idiom("bert", "vit")
def _autocast(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        log(model(**inputs).logits)
    _see(model, inputs, log)


@idiom("bert", "gpt2", "vit")
def _trainer_step(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    """What Trainer does in one step: train mode, clipping, schedule, zero_grad."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 1, 4)
    model.train()
    for step in range(3):
        torch.manual_seed(step)
        loss = _loss(model, inputs)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        model.zero_grad()
        log(loss, norm)
    _see(model.eval(), inputs, log)


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
    _see(student, inputs, log)
    _train(student, inputs, log)
    _see(student, inputs, log)
    _see(model, inputs, log)


@idiom("gpt2", "llama")
def _perplexity(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    ids = _ids(1, 40)
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
        _see(model, inputs(), log)
        function(model, inputs(), log)

    check(build, use, form, inputs, tolerance=3e-5)
