"""Models of sentence-transformers as whole objects: texts in, vectors or scores out."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import oxytorch
from oxytorch.optimize.text_models import core_of, is_text_model

transformers = pytest.importorskip("transformers")
st = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")

TEXTS = [
    "a b c",
    "the cat sat on the mat and the dog sat on the cat",
    "dog",
    "on the mat a cat",
] * 2
PAIRS = [("a cat", "the cat sat"), ("dog", "on the mat a b c"), ("b", "c")] * 2
BFLOAT16 = 5e-2  # docs/numerics.md
WAYS = [
    {},
    {"sample_input": TEXTS},
    {"sample_input": TEXTS, "graph": True},
    {"graph": False},
    {"dtype": torch.bfloat16},
    {"dtype": torch.bfloat16, "sample_input": TEXTS},
    {"dtype": torch.bfloat16, "sample_input": TEXTS, "graph": True},
    {"dtype": torch.bfloat16, "sample_input": TEXTS, "graph": False},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A BERT of random weights with a tokenizer of a few words."""
    made = tmp_path_factory.mktemp("bert")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted({*" ".join(TEXTS).split()})]
    (made / "vocab.txt").write_text("\n".join(words) + "\n")
    transformers.BertTokenizerFast(vocab=str(made / "vocab.txt")).save_pretrained(made)
    torch.manual_seed(3)
    config = transformers.BertConfig(
        vocab_size=len(words), hidden_size=192, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=256, max_position_embeddings=64, num_labels=1,
    )  # fmt: skip
    transformers.BertForSequenceClassification(config).save_pretrained(made)
    return str(made)


def _encoder(folder: str, pooling: str = "mean", dense: bool = False) -> Any:
    parts: list[nn.Module] = [modules.Transformer(folder), modules.Pooling(192, pooling)]
    if dense:
        parts.append(modules.Dense(192, 16))
    return st.SentenceTransformer(modules=[*parts, modules.Normalize()], device="cpu")


def _gap(found: Any, wanted: Any) -> float:
    found, wanted = torch.as_tensor(found).double(), torch.as_tensor(wanted).double()
    assert found.shape == wanted.shape
    return float((found - wanted).abs().max() / wanted.abs().max())


def _allowed(way: dict[str, Any]) -> float:
    return BFLOAT16 if "dtype" in way else 1e-5


def _name(way: object) -> str:
    if not isinstance(way, dict):
        return str(way)
    return "-".join(f"no_{key}" if value is False else key for key, value in way.items()) or "plain"


@pytest.mark.parametrize("way", WAYS, ids=_name)
@pytest.mark.parametrize("dense", [False, True], ids=["", "dense"])
def test_encode_gives_the_same_vectors(folder: str, way: dict[str, Any], dense: bool) -> None:
    model = _encoder(folder, dense=dense)
    assert model.training, "encode itself puts it into evaluation mode"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimized = oxytorch.optimize(model, **way)
    assert model.training and not any(part.training for part in optimized.modules())
    assert type(optimized) is type(model)
    for batch_size in (8, 3, 3, 1, 3):
        found = optimized.encode(TEXTS, batch_size=batch_size)
        assert found.dtype.name == "float32"
        assert _gap(found, model.encode(TEXTS, batch_size=batch_size)) <= _allowed(way)
        model.train()
    tensor = optimized.encode(TEXTS, convert_to_tensor=True, normalize_embeddings=True)
    assert tensor.dtype == torch.float32
    torch.testing.assert_close(tensor.norm(dim=1), torch.ones(len(TEXTS)))
    assert _gap(optimized.encode("a cat"), model.encode("a cat")) <= _allowed(way)
    tokens = optimized.encode(TEXTS, output_value="token_embeddings")
    assert {each.dtype for each in tokens} == {torch.float32}
    core = core_of(optimized)
    assert core is not None
    if "graph" in way:  # else the time of a call decides
        assert ("Replay" in type(core.forward).__name__) == way["graph"]


@pytest.mark.parametrize(
    "pooling", ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
)
def test_every_pooling_is_served(folder: str, pooling: str) -> None:
    model = _encoder(folder, pooling)
    wanted = model.encode(TEXTS)
    optimized = oxytorch.optimize(model, sample_input=TEXTS, graph=True)
    for batch_size in (8, 3, 3):
        assert _gap(optimized.encode(TEXTS, batch_size=batch_size), wanted) <= 1e-5


@pytest.mark.parametrize("way", WAYS, ids=_name)
def test_predict_and_rank_give_the_same_scores(folder: str, way: dict[str, Any]) -> None:
    model = st.CrossEncoder(folder, device="cpu")
    optimized = oxytorch.optimize(model, **{**way, **({"sample_input": PAIRS} if way else {})})
    for batch_size in (6, 2, 2):
        wanted = model.predict(PAIRS, batch_size=batch_size)
        assert _gap(optimized.predict(PAIRS, batch_size=batch_size), wanted) <= _allowed(way)
    assert optimized.predict(PAIRS, convert_to_tensor=True).dtype == torch.float32
    ranked = optimized.rank("a cat", TEXTS[:3])
    scores = {each["corpus_id"]: each["score"] for each in model.rank("a cat", TEXTS[:3])}
    for each in ranked:
        assert each["score"] == pytest.approx(scores[each["corpus_id"]], rel=_allowed(way))


def test_samples_may_be_texts_pairs_and_features(folder: str) -> None:
    model = _encoder(folder)
    wanted = model.encode(TEXTS)
    features = model.preprocess(TEXTS)
    before = {*features}
    for sample in ("a cat", TEXTS, tuple(TEXTS), features, dict(features), (features,)):
        optimized = oxytorch.optimize(model, sample_input=sample)
        assert oxytorch.explain(optimized).applied
        assert _gap(optimized.encode(TEXTS), wanted) <= 1e-5
    assert {*features} == before
    pairs = st.CrossEncoder(folder, device="cpu")
    for sample in (PAIRS, PAIRS[0], [[*pair] for pair in PAIRS]):
        optimized = oxytorch.optimize(pairs, sample_input=sample)
        assert _gap(optimized.predict(PAIRS), pairs.predict(PAIRS)) <= 1e-5


def test_wrong_samples_are_named(folder: str) -> None:
    model = _encoder(folder)
    for wrong, name in ((3, "a int"), ([3], "a list of int"), ([], "a list"), ([None], "NoneType")):
        with pytest.raises(TypeError, match=f"SentenceTransformer to be texts.*{name}"):
            oxytorch.optimize(model, sample_input=wrong)
    assert model.training


def test_the_model_itself_may_be_changed_and_restored(folder: str) -> None:
    model = _encoder(folder)
    wanted = _encoder(folder).encode(TEXTS)
    assert oxytorch.optimize(model, sample_input=TEXTS, graph=True, inplace=True) is model
    assert not model.training
    assert _gap(model.encode(TEXTS), wanted) <= 1e-5
    oxytorch.undo(model)
    assert all("forward" not in part.__dict__ for part in model.modules())
    assert (model.encode(TEXTS) == wanted).all()


def test_programs_of_several_lengths_are_improved(folder: str) -> None:
    model = _encoder(folder)
    optimized = oxytorch.optimize(model, sample_input=TEXTS, graph=True)
    for batch_size in (3, 3, 4, 4):
        optimized.encode(TEXTS, batch_size=batch_size)
    core = core_of(optimized)
    assert core is not None
    programs = {str(program) for program in core.forward.programs()}
    assert len(programs) > 1
    assert all("oxytorch::layer_norm" in program for program in programs)


def test_verify_and_tune_take_texts(folder: str) -> None:
    model = _encoder(folder)
    optimized = oxytorch.optimize(model, sample_input=TEXTS, verify=True)
    assert oxytorch.explain(optimized).verified
    tuned = oxytorch.optimize(model, sample_input=TEXTS, tune=True, dtype=torch.bfloat16)
    assert _gap(tuned.encode(TEXTS), model.encode(TEXTS)) <= BFLOAT16


def test_a_written_weight_is_followed(folder: str) -> None:
    model = _encoder(folder)
    optimized = oxytorch.optimize(model, sample_input=TEXTS, graph=True)
    with torch.no_grad():
        for each in (model, optimized):
            core = core_of(each)
            assert core is not None
            core.get_parameter("encoder.layer.0.output.dense.weight").mul_(3)
    assert _gap(optimized.encode(TEXTS), model.encode(TEXTS)) <= 1e-5


def test_models_are_told_by_their_structure(folder: str, tmp_path: Path) -> None:
    assert is_text_model(_encoder(folder))
    assert is_text_model(st.CrossEncoder(folder, device="cpu"))
    assert not is_text_model(nn.Sequential(nn.Linear(2, 2)))

    class Own(nn.Sequential):
        def encode(self) -> None: ...

    assert not is_text_model(Own(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match=r"call model.eval\(\) first"):
        oxytorch.optimize(Own(nn.Linear(2, 2)))


def test_models_without_transformers_are_served() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({"[UNK]": 0, "cat": 1, "dog": 2}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model = st.SentenceTransformer(
        modules=[modules.StaticEmbedding(tokenizer, embedding_dim=16)], device="cpu"
    )
    assert core_of(model) is None
    wanted = model.encode(TEXTS)
    for way in WAYS:
        optimized = oxytorch.optimize(model, **way)
        assert _gap(optimized.encode(TEXTS), wanted) <= _allowed(way)
