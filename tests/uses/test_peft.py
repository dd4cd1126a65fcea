"""What the documentation of PEFT does with a model, before and after it is optimized."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from .compare import Log
from .registers import into, into_of
from .transformers_models import MODELS, loss_of, see, spread, token_ids, train

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

FORMS = ("default", "sample", "program", "llm", "int8", "int4", "llm_int8")
ROUNDED = ("int8", "int4", "llm_int8")
ORDERS = ("wrapped_after", "wrapped_before")
Config = Callable[[], Any]
Use = Callable[[Any, dict[str, torch.Tensor], Log], None]

TARGETS = ["q_proj", "v_proj"]
MLP = ["gate_proj", "down_proj"]


def lora(targets: Any = TARGETS, **settings: Any) -> Any:
    settings = {"r": 4, "lora_alpha": 8, **settings}
    return peft.LoraConfig(task_type="CAUSAL_LM", target_modules=targets, **settings)


def _of(name: str, **settings: Any) -> Config:
    """A configuration of PEFT for a causal language model, once it is asked for."""
    return lambda: getattr(peft, f"{name}Config")(task_type="CAUSAL_LM", **settings)


TUNERS: dict[str, Config] = {
    "lora": lora,
    "lora_of_all": lambda: lora("all-linear"),
    "lora_by_pattern": lambda: lora(r".*layers\.1\..*(up|down)_proj"),
    "lora_of_one_layer": lambda: lora(layers_to_transform=[1], layers_pattern="layers"),
    "lora_ranks": lambda: lora(
        rank_pattern={"layers.1.self_attn.q_proj": 2}, alpha_pattern={"v_proj": 3}
    ),
    "lora_rslora": lambda: lora(use_rslora=True),
    "lora_dora": lambda: lora([*TARGETS, *MLP], use_dora=True),
    "lora_bias": lambda: lora(bias="lora_only", lora_bias=True),
    "lora_dropout": lambda: lora(lora_dropout=0.1),
    "lora_pissa": lambda: lora(init_lora_weights="pissa"),
    "lora_olora": lambda: lora(init_lora_weights="olora"),
    "lora_orthogonal": lambda: lora(init_lora_weights="orthogonal"),
    "lora_of_embeddings": lambda: lora(["embed_tokens", "lm_head"]),
    "lora_new_tokens": lambda: lora(trainable_token_indices={"embed_tokens": [4, 7]}),
    "lora_repeated_layers": lambda: lora(layer_replication=[[0, 2], [1, 2]]),
    "lora_target_parameters": lambda: lora([], target_parameters=["up_proj.weight"]),
    "modules_to_save": lambda: lora(modules_to_save=["lm_head", "norm"]),
    "adalora": _of("AdaLora", r=4, target_modules=TARGETS, total_step=10, tinit=1, tfinal=2),
    "ia3": _of(
        "IA3", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "loha": _of("LoHa", r=4, alpha=8, target_modules=TARGETS),
    "lokr": _of("LoKr", r=4, alpha=8, target_modules=TARGETS),
    "oft": _of("OFT", oft_block_size=8, target_modules=TARGETS),
    "boft": _of("BOFT", boft_block_size=8, target_modules=["q_proj"]),
    "hra": _of("HRA", r=4, target_modules=TARGETS),
    "vera": _of("Vera", r=4, target_modules=["q_proj"]),
    "randlora": _of("RandLora", r=4, target_modules=["q_proj"]),
    "fourierft": _of("FourierFT", n_frequency=20, target_modules=TARGETS),
    "vblora": _of("VBLoRA", r=2, num_vectors=8, vector_length=8, target_modules=["q_proj"]),
    "miss": _of("Miss", r=4, target_modules=TARGETS),
    "shira": _of("Shira", r=2, target_modules=TARGETS),
    "c3a": _of("C3A", block_size=8, target_modules=["q_proj"]),
    "road": _of("Road", group_size=8, target_modules=TARGETS),
    "delora": _of("Delora", r=4, target_modules=TARGETS),
    "waveft": _of("WaveFT", n_frequency=20, target_modules=TARGETS),
    "ln_tuning": _of("LNTuning", target_modules=["input_layernorm", "norm"]),
    "trainable_tokens": _of(
        "TrainableTokens", token_indices=[4, 7], target_modules=["embed_tokens"]
    ),
    "prompt_tuning": _of("PromptTuning", num_virtual_tokens=3),
    "p_tuning": _of("PromptEncoder", num_virtual_tokens=3, encoder_hidden_size=16),
    "prefix_tuning": _of("PrefixTuning", num_virtual_tokens=3),
    "prefix_projected": _of(
        "PrefixTuning", num_virtual_tokens=3, prefix_projection=True, encoder_hidden_size=16
    ),
    "adaption_prompt": _of("AdaptionPrompt", adapter_len=3, adapter_layers=1),
}  # fmt: skip
"""The kinds of adapters, for a Llama."""


def wrapped(model: nn.Module, config: Any) -> Any:
    """The model with an adapter of other values than those that change nothing."""
    torch.manual_seed(6)
    wrapped = peft.get_peft_model(model, config)
    stirred(wrapped)
    return wrapped.eval()


def stirred(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad and p.is_floating_point():
                p.add_(torch.randn(p.shape, generator=generator).mul_(0.05))


def generated(model: Any, log: Log) -> None:
    """Log tokens of greedy search, of one prompt and of two."""
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[1, :2] = 0
    log(model.generate(input_ids=token_ids(1, 5), **options))
    log(model.generate(input_ids=token_ids(2, 6), attention_mask=mask, **options))


def life(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    """What every tutorial does: look, train, look, generate, switch off, merge, take away."""
    log(sorted(n for n, p in model.named_parameters() if p.requires_grad))
    see(model, inputs, log)
    model.train()
    torch.manual_seed(4)
    train(model, inputs, log)
    model.eval()
    see(model, inputs, log)
    generated(model, log)
    with model.disable_adapter():
        see(model, inputs, log)
    see(model, inputs, log)


def merged(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    """Merge, take the merging back, and merge for good."""
    see(model, inputs, log)
    model.merge_adapter()
    see(model, inputs, log)
    generated(model, log)
    model.unmerge_adapter()
    see(model, inputs, log)
    model.merge_adapter(safe_merge=True)
    model.unmerge_adapter()
    plain = model.merge_and_unload()
    log(type(plain).__name__, sorted(plain.state_dict()))
    see(plain, inputs, log)
    generated(plain, log)


def stored(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    """Save the adapter, and load it into another model of the same values."""
    see(model, inputs, log)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        log(sorted(path.name for path in Path(folder).iterdir()))
        state = peft.get_peft_model_state_dict(model)
        log(dict(sorted(state.items())))
        base = model.unload() if hasattr(model, "unload") else model.get_base_model()
        see(base, inputs, log)
        again = peft.PeftModel.from_pretrained(base, folder).eval()
        see(again, inputs, log)
        other = peft.PeftModel.from_pretrained(again.get_base_model(), folder, is_trainable=True)
        log(sorted(n for n, p in other.named_parameters() if p.requires_grad))


def merged_once(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    """Merge for good; weights of few bits round what is written to them."""
    plain = model.merge_and_unload()
    log(type(plain).__name__, sorted(plain.state_dict()))
    see(plain, inputs, log)
    see(plain, inputs, log)


LIVES: dict[str, Use] = {
    "life": life,
    "merged": merged,
    "stored": stored,
    "merged_once": merged_once,
}
NOT_MERGED = (
    "lora_bias", "lora_repeated_layers", "prompt_tuning", "p_tuning", "prefix_tuning",
    "prefix_projected", "adaption_prompt",
)  # fmt: skip
"""Kinds that PEFT itself does not merge."""
NOT_STORED = ("lora_target_parameters", "vera")
"""Kinds that PEFT does not put onto a model that it has just taken them from."""

USES: dict[str, Use] = {}
use = into(USES)
"""Registers a use of a Llama with an adapter by LoRA."""


@use
def _looked_at(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    log(model.get_nb_trainable_parameters(), model.active_adapters, model.peft_type)
    log([vars(s) for s in model.get_layer_status()], vars(model.get_model_status()))
    log(model.base_model_torch_dtype, type(model.get_base_model()).__name__, len(str(model)))
    log(peft.get_layer_status(model)[0].name)
    see(model.get_base_model(), inputs, log)


def _add_second(model: Any, adapter: Any) -> None:
    torch.manual_seed(8)
    model.add_adapter("second", adapter)
    model.set_adapter("second")
    stirred(model)


@use
def _several_adapters(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    _add_second(model, lora(["q_proj", "up_proj"], r=2))
    model.eval()
    see(model, inputs, log)
    model.set_adapter("default")
    see(model, inputs, log)
    model.base_model.set_adapter(["default", "second"])
    see(model, inputs, log)
    generated(model, log)
    model.delete_adapter("second")
    model.set_adapter("default")
    see(model, inputs, log)
    log(sorted(model.peft_config))


@use
def _weighted_adapters(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    _add_second(model, lora())
    names, weights = ["default", "second"], [0.7, 0.4]
    for kind in ("linear", "cat", "ties", "dare_linear", "dare_ties", "magnitude_prune", "svd"):
        torch.manual_seed(9)
        dense = {"density": 0.5} if kind not in ("linear", "cat", "svd") else {}
        model.add_weighted_adapter(names, weights, kind, combination_type=kind, **dense)
        model.set_adapter(kind)
        model.eval()
        if kind != "svd":
            see(model, inputs, log)
    model.merge_adapter(["default", "second"])
    see(model, inputs, log)


@use
def _rows_of_different_adapters(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    _add_second(model, lora())
    model.eval()
    names = ["second", "__base__"]
    with torch.no_grad():
        log(model(**inputs, adapter_names=names).logits)
        log(model(**inputs, adapter_names=["default", "second"]).logits)
        log(model.generate(
            **inputs, adapter_names=names, max_new_tokens=4, min_new_tokens=4, do_sample=False,
            pad_token_id=0,
        ))  # fmt: skip
    see(model, inputs, log)


@use
def _only_a_part_merged(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    layers = [m for m in model.modules() if isinstance(m, peft.tuners.tuners_utils.BaseTunerLayer)]
    layers[0].merge()
    see(model, inputs, log)
    layers[1].enable_adapters(False)
    see(model, inputs, log)
    layers[1].enable_adapters(True)
    layers[0].unmerge()
    layers[-1].scale_layer(3.0)
    see(model, inputs, log)
    layers[-1].unscale_layer()
    see(model, inputs, log)
    layers[0].set_scale("default", 0.5)
    see(model, inputs, log)


@use
def _rescaled(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    with peft.helpers.rescale_adapter_scale(model, 0.3):
        see(model, inputs, log)
    see(model, inputs, log)
    with peft.helpers.disable_input_dtype_casting(model):
        see(model, inputs, log)


@use
def _state_exchanged(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    state = {n: v * 0.5 for n, v in peft.get_peft_model_state_dict(model).items()}
    log(peft.set_peft_model_state_dict(model, state).unexpected_keys)
    see(model, inputs, log)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        stirred(model)
        log(model.load_adapter(folder, adapter_name="loaded").unexpected_keys)
        model.set_adapter("loaded")
        see(model, inputs, log)
        from peft.utils.hotswap import hotswap_adapter

        hotswap_adapter(model, folder, adapter_name="default", torch_device="cpu")
        model.set_adapter("default")
        see(model, inputs, log)


@use
def _unloaded_and_wrapped_again(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    see(model, inputs, log)
    plain = model.unload()
    see(plain, inputs, log)
    generated(plain, log)
    again = wrapped(plain, lora("all-linear"))
    see(again, inputs, log)
    generated(again, log)
    plain = again.merge_and_unload(progressbar=False)
    see(plain, inputs, log)
    third = wrapped(plain, lora(MLP))
    see(third, inputs, log)


@use
def _checkpointed_and_clipped(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(3):
        loss = model(**inputs, labels=inputs["input_ids"]).loss
        loss.backward()
        log(loss, torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
    model.gradient_checkpointing_disable()
    see(model.eval(), inputs, log)


@use
def _accumulated_under_autocast(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    model.train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(2):
            (loss_of(model, inputs) / 2).backward()
    log([p.grad.shape for p in model.parameters() if p.grad is not None])
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        log(model.eval()(**inputs).logits)
    see(model, inputs, log)


@use
def _trained_by_other_rates(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    from peft.optimizers import create_lorafa_optimizer, create_loraplus_optimizer

    makers: list[Callable[[], Any]] = [
        lambda: create_loraplus_optimizer(model, torch.optim.AdamW, lr=1e-2, loraplus_lr_ratio=16),
        lambda: create_lorafa_optimizer(model, r=4, lora_alpha=8, lr=1e-2),
    ]
    for make in makers:
        optimizer = make()
        for _ in range(2):
            loss_of(model, inputs).backward()
            optimizer.step()
            optimizer.zero_grad()
        see(model, inputs, log)


@use
def _converted(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    model.double()
    with torch.no_grad():
        log(model(**inputs).logits)
    model.float()
    see(model, inputs, log)


@use
def _in_bfloat16(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    model.to(torch.bfloat16)
    with torch.no_grad():
        log(model(**inputs).logits)
    peft.cast_mixed_precision_params(model, torch.bfloat16)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        log(model(**inputs).logits)


@use
def _copied(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    other = copy.deepcopy(model)
    plain = other.merge_and_unload()
    see(plain, inputs, log)
    see(model, inputs, log)
    generated(model, log)


@use
def _compiled(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        log(compiled(**inputs).logits, compiled(**inputs).logits)
    with model.disable_adapter(), torch.no_grad():
        log(compiled(**inputs).logits)
    torch._dynamo.reset()


@use
def _generates_between_steps(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    """The adapter goes on in training while the base model answers."""
    for _ in range(2):
        model.train()
        train(model, inputs, log, 1)
        model.eval()
        generated(model, log)
        with model.disable_adapter():
            generated(model, log)


BASE_USES: dict[str, tuple[str, Use]] = {}
base_use = into_of(BASE_USES)
"""Registers what PEFT does with a base model, for models of these names."""


def _targets(model: Any) -> Any:
    kinds = {"bert": ["query", "value"], "gpt2": ["c_attn"], "t5": ["q", "v"], "vit": ["query"]}
    return kinds.get(model.config.model_type, TARGETS)


def _task_config(model: Any, **settings: Any) -> Any:
    tasks = {"bert": "SEQ_CLS", "t5": "SEQ_2_SEQ_LM", "gpt2": "CAUSAL_LM", "llama": "CAUSAL_LM"}
    kinds = {"vit": ["query", "value"], "resnet": ["convolution"]}
    targets = kinds.get(model.config.model_type) or _targets(model)
    return peft.LoraConfig(
        task_type=tasks.get(model.config.model_type), target_modules=targets, r=4, **settings
    )


@base_use(*MODELS)
def _task(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    see(model, inputs, log)
    adapted = wrapped(model, _task_config(model))
    see(adapted, inputs, log)
    train(adapted, inputs, log)
    see(adapted, inputs, log)
    with adapted.disable_adapter():
        see(adapted, inputs, log)
    adapted.merge_adapter()
    see(adapted, inputs, log)
    adapted.unmerge_adapter()
    see(adapted, inputs, log)
    see(adapted.merge_and_unload(), inputs, log)


@base_use("bert", "vit", "resnet")
def _head_trained(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    adapted = wrapped(model, _task_config(model, modules_to_save=["classifier"]))
    see(adapted, inputs, log)
    train(adapted, inputs, log)
    see(adapted, inputs, log)
    with adapted.disable_adapter():
        see(adapted, inputs, log)
    see(adapted.merge_and_unload(), inputs, log)


@base_use("bert", "llama", "t5")
def _of_transformers(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    """The integration of PEFT in transformers, without a PeftModel."""
    see(model, inputs, log)
    torch.manual_seed(6)
    model.add_adapter(_task_config(model), adapter_name="first")
    stirred(model)
    see(model.eval(), inputs, log)
    torch.manual_seed(7)
    model.add_adapter(_task_config(model), adapter_name="second")
    model.set_adapter("second")
    see(model, inputs, log)
    model.set_adapter(["first", "second"])
    see(model, inputs, log)
    log(model.active_adapters(), sorted(model.get_adapter_state_dict("first")))
    model.disable_adapters()
    see(model, inputs, log)
    model.enable_adapters()
    model.set_adapter("first")
    see(model, inputs, log)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        model.delete_adapter(["first", "second"])
        see(model, inputs, log)
        model.load_adapter(folder)
        see(model, inputs, log)


@base_use("bert", "llama")
def _injected(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    see(model, inputs, log)
    torch.manual_seed(6)
    model = peft.inject_adapter_in_model(_task_config(model), model, "mine")
    stirred(model)
    see(model.eval(), inputs, log)
    train(model, inputs, log)
    see(model, inputs, log)


@base_use("llama")
def _mixed_kinds(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    see(model, inputs, log)
    torch.manual_seed(6)
    mixed = peft.get_peft_model(model, lora(), mixed=True)
    mixed.add_adapter("other", TUNERS["loha"]())
    mixed.set_adapter(["default", "other"])
    stirred(mixed)
    see(mixed.eval(), inputs, log)
    mixed.merge_adapter()
    see(mixed, inputs, log)
    mixed.unmerge_adapter()
    see(mixed, inputs, log)


@base_use("bert", "t5", "gpt2")
def _virtual_tokens(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    tasks = {"bert": "SEQ_CLS", "t5": "SEQ_2_SEQ_LM", "gpt2": "CAUSAL_LM"}
    task = tasks[model.config.model_type]
    see(model, inputs, log)
    kinds: list[Any] = [peft.PromptTuningConfig(task_type=task, num_virtual_tokens=3)]
    if task != "SEQ_CLS":
        kinds.append(peft.PrefixTuningConfig(task_type=task, num_virtual_tokens=3))
    for kind in kinds:
        adapted = wrapped(model, kind)
        see(adapted, inputs, log)
        train(adapted, inputs, log)
        see(adapted, inputs, log)
        see(adapted.get_base_model(), inputs, log)


@base_use("bert", "llama")
def _prepared_for_few_bits(model: Any, inputs: dict[str, torch.Tensor], log: Log) -> None:
    model = peft.prepare_model_for_kbit_training(model)
    adapted = wrapped(model, _task_config(model))
    see(adapted, inputs, log)
    adapted.train()
    train(adapted, inputs, log)
    see(adapted.eval(), inputs, log)


def _wrapping(
    name: str, run: Use, order: str, config: Config
) -> tuple[Callable[[], Any], Callable[[Any, Log], None]]:
    """How to build the model, and the use, which wraps it unless building did."""
    build, inputs = MODELS[name]

    def wrap_and_run(model: Any, log: Log) -> None:
        see(model, inputs(), log)
        run(wrapped(model, config()), inputs(), log)

    if order == "wrapped_after":
        return build, wrap_and_run
    return lambda: wrapped(build(), config()), lambda model, log: run(model, inputs(), log)


def _adapter_cases() -> Iterator[Any]:
    every = [(f"{name}-{what}", name, what) for name in TUNERS for what in LIVES]
    every = [e for e in every if not (e[2].startswith("merged") and e[1] in NOT_MERGED)]
    every = [e for e in every if not (e[2] == "stored" and e[1] in NOT_STORED)]
    for number, (label, name, what) in enumerate(every):
        for turn, (order, form) in enumerate((o, f) for o in ORDERS for f in FORMS):
            if what in ("merged", "merged_once") and (what == "merged_once") != (form in ROUNDED):
                continue
            often = number % 14 == turn
            yield pytest.param(
                name, what, order, form, id=f"{label}-{order}-{form}",
                marks=() if often else pytest.mark.slow,
            )  # fmt: skip


TOLERANCES = {"int8": 4e-2, "llm_int8": 4e-2, "int4": 0.6}
WRITING = ("weighted_adapters", "unloaded_and_wrapped_again", "copied", "only_a_part_merged")
WRITTEN = ("lora_pissa", "lora_olora", "merged_once", *WRITING)
"""What writes to weights; those of few bits round it again."""


def _tolerance(form: str, *names: str) -> float:
    return TOLERANCES.get(form, 3e-5) if {*names} & {*WRITTEN} else 3e-5


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "what", "order", "form"), _adapter_cases())
def test_kind_of_adapter(
    check: Callable[..., None], name: str, what: str, order: str, form: str
) -> None:
    build, run = _wrapping("llama", LIVES[what], order, TUNERS[name])
    check(build, run, form, MODELS["llama"][1], tolerance=_tolerance(form, name, what))


def _use_cases() -> Iterator[Any]:
    for number, name in enumerate(USES):
        for turn, (order, form) in enumerate((o, f) for o in ORDERS for f in FORMS):
            often = number % 14 == turn
            yield pytest.param(
                name, order, form, id=f"{name}-{order}-{form}",
                marks=() if often else pytest.mark.slow,
            )  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "order", "form"), _use_cases())
def test_use_of_adapters(check: Callable[..., None], name: str, order: str, form: str) -> None:
    build, run = _wrapping("llama", USES[name], order, lora)
    check(build, run, form, MODELS["llama"][1], tolerance=_tolerance(form, name))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "form"), spread(BASE_USES, FORMS))
def test_base_model(check: Callable[..., None], name: str, form: str) -> None:
    network, run = BASE_USES[name]
    if form.startswith("llm") and network not in ("gpt2", "llama"):
        pytest.skip("no causal language model")
    build, inputs = MODELS[network]
    tolerance = TOLERANCES.get(form, 3e-5)  # merging, and training a head, write to weights
    check(build, lambda model, log: run(model, inputs(), log), form, inputs, tolerance=tolerance)
