"""The models that `oxytorch bench zoo` times: real widths and inputs, fewer layers where all of
them would take too long.

All have random weights, and nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oxytorch.benchmark.models.cases import CASES as MODELS
from oxytorch.benchmark.models.cases import Inputs, ModelCase

Draw = Callable[[int], Inputs]
"""Batch size -> inputs."""

TOKENS, VOCABULARY, IMAGE, RATE = 128, 30_000, 224, 16_000


def _tokens(batch: int) -> Inputs:
    shape = (batch, TOKENS)
    return {
        "input_ids": torch.randint(3, VOCABULARY, shape),
        "attention_mask": torch.ones(shape, dtype=torch.int64),
    }


def _translation(batch: int) -> Inputs:
    ids = torch.randint(3, VOCABULARY, (batch, TOKENS // 4))
    return {**_named(_tokens(batch)), "decoder_input_ids": ids}


def _images(size: int = IMAGE) -> Draw:
    return lambda batch: {"pixel_values": torch.randn(batch, 3, size, size)}


def _waves(seconds: int = 1) -> Draw:
    return lambda batch: {"input_values": torch.randn(batch, seconds * RATE)}


def _spectrogram(batch: int) -> Inputs:
    """Thirty seconds in 80 bands, the one length that Whisper takes."""
    return {"input_features": torch.randn(batch, 80, 3000)}


def _pairs(batch: int) -> Inputs:
    return {**_named(_tokens(batch)), **_named(_images()(batch))}


def _short_pairs(batch: int) -> Inputs:
    """Images and captions of 32 tokens."""
    text = {name: tensor[:, :32] for name, tensor in _named(_tokens(batch)).items()}
    return {**text, **_named(_images()(batch))}


def _named(inputs: Inputs) -> dict[str, Tensor]:
    assert isinstance(inputs, dict)
    return inputs


def _architecture(
    name: str, title: str, kind: str, inputs: Draw, **settings: Any
) -> tuple[str, ModelCase]:
    """A class of `transformers` in its default configuration but for these settings."""

    def make() -> nn.Module:
        import transformers

        chosen = getattr(transformers, kind)
        return chosen(chosen.config_class(**settings))  # type: ignore[no-any-return]

    return name, ModelCase(name, title, 1, _built(make, inputs))


def _network(name: str, title: str, make: Callable[[], nn.Module], inputs: Draw) -> Any:
    return name, ModelCase(name, title, 1, _built(make, inputs))


def _built(
    make: Callable[[], nn.Module], inputs: Draw
) -> Callable[[int], tuple[nn.Module, Inputs]]:
    def build(batch: int) -> tuple[nn.Module, Inputs]:
        torch.manual_seed(0)
        model = make().eval()
        _set_statistics(model, inputs)
        torch.manual_seed(1)
        return model, inputs(batch)

    return build


def _set_statistics(model: nn.Module, inputs: Draw) -> None:
    """Give batch norms the statistics of a batch, or activations grow from layer to layer."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.train()
        norm.momentum = None
        norm.reset_running_stats()
    with torch.no_grad():
        given = inputs(2)
        model(**given) if isinstance(given, dict) else model(*given)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.eval()
        norm.momentum = momentum


class UNet(nn.Module):
    """The U-Net of segmentation: four levels of double convolutions, images [batch, 3, h, w]."""

    def __init__(self, channels: int = 32, levels: int = 4) -> None:
        super().__init__()
        sizes = [channels * 2**level for level in range(levels)]
        self.down = nn.ModuleList(
            self._double(before, size) for before, size in zip([3, *sizes], sizes, strict=False)
        )
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(2 * size, size, 2, 2) for size in reversed(sizes[:-1])
        )
        self.join = nn.ModuleList(self._double(2 * size, size) for size in reversed(sizes[:-1]))
        self.head = nn.Conv2d(channels, 2, 1)

    @staticmethod
    def _double(inside: int, outside: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for before in (inside, outside):
            layers += [
                nn.Conv2d(before, outside, 3, padding=1, bias=False),
                nn.BatchNorm2d(outside),
                nn.ReLU(inplace=True),
            ]
        return nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for index, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if index else x)
            skips.append(x)
        skips.pop()
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([skips.pop(), up(x)], dim=1))
        return self.head(x)  # type: ignore[no-any-return]


class TemporalNetwork(nn.Module):
    """Dilated residual convolutions over time, [batch, channels, steps]."""

    def __init__(self, channels: int = 128, blocks: int = 8) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Conv1d(channels, channels, 3, padding=2**block, dilation=2**block)
            for block in range(blocks)
        )
        self.head = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        for convolution in self.convolutions:
            x = x + torch.relu(convolution(x))
        return self.head(x.mean(-1))  # type: ignore[no-any-return]


_LAYERS = {"num_hidden_layers": 6, "vocab_size": VOCABULARY}
_DECODER = {
    **_LAYERS, "hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12,
    "num_key_value_heads": 4, "use_cache": False,
}  # fmt: skip
_RESNET_18 = {"depths": [2, 2, 2, 2], "hidden_sizes": [64, 128, 256, 512], "layer_type": "basic"}
_FOUR = {"num_hidden_layers": 4}

ZOO: dict[str, ModelCase] = dict([
    _architecture("bert", "BERT-base, 6 layers", "BertModel", _tokens, **_LAYERS),
    _architecture("distilbert", "DistilBERT", "DistilBertModel", _tokens, vocab_size=VOCABULARY),
    _architecture("xlm_roberta", "XLM-RoBERTa-base, 6 layers", "XLMRobertaModel", _tokens,
                  **_LAYERS, max_position_embeddings=514, pad_token_id=1),
    _architecture("albert", "ALBERT-base, 6 layers", "AlbertModel", _tokens, **_LAYERS,
                  hidden_size=768, num_attention_heads=12, intermediate_size=3072),
    _architecture("electra", "ELECTRA-small", "ElectraModel", _tokens, vocab_size=VOCABULARY),
    _architecture("deberta", "DeBERTa-base, 4 layers", "DebertaModel", _tokens,
                  vocab_size=VOCABULARY, **_FOUR, relative_attention=True,
                  pos_att_type=["c2p", "p2c"]),
    _architecture("deberta_v2", "DeBERTa-v3-base, 4 layers", "DebertaV2Model", _tokens,
                  vocab_size=VOCABULARY, **_FOUR, hidden_size=768, num_attention_heads=12,
                  intermediate_size=3072, relative_attention=True, position_buckets=256,
                  pos_att_type=["p2c", "c2p"], share_att_key=True, norm_rel_ebd="layer_norm"),
    _architecture("mobilebert", "MobileBERT, 8 layers", "MobileBertModel", _tokens,
                  vocab_size=VOCABULARY, num_hidden_layers=8),
    _architecture("mpnet", "MPNet-base, 6 layers", "MPNetModel", _tokens, **_LAYERS),
    _architecture("convbert", "ConvBERT-base, 4 layers", "ConvBertModel", _tokens,
                  vocab_size=VOCABULARY, **_FOUR),
    _architecture("squeezebert", "SqueezeBERT, 6 layers", "SqueezeBertModel", _tokens, **_LAYERS),
    _architecture("modernbert", "ModernBERT-base, 8 layers", "ModernBertModel", _tokens,
                  vocab_size=VOCABULARY, num_hidden_layers=8, pad_token_id=0, bos_token_id=1,
                  eos_token_id=2, cls_token_id=1, sep_token_id=2),
    _architecture("xlnet", "XLNet-base, 4 layers", "XLNetModel", _tokens, vocab_size=VOCABULARY,
                  n_layer=4, d_model=768, n_head=12, d_inner=3072, use_mems_eval=False),
    _architecture("esm", "ESM-2 8M", "EsmModel", _tokens, **_LAYERS, hidden_size=320,
                  num_attention_heads=20, intermediate_size=1280, pad_token_id=1,
                  position_embedding_type="rotary"),
    _architecture("t5_encoder", "T5-small, encoder", "T5EncoderModel", _tokens,
                  vocab_size=VOCABULARY, use_cache=False),
    _architecture("gpt2", "GPT-2, 6 layers", "GPT2Model", _tokens, vocab_size=VOCABULARY,
                  n_layer=6, use_cache=False),
    _architecture("opt", "OPT-125M, 6 layers", "OPTModel", _tokens, **_LAYERS, use_cache=False),
    _architecture("bloom", "BLOOM, 768 wide, 4 layers", "BloomModel", _tokens,
                  vocab_size=VOCABULARY, hidden_size=768, n_layer=4, n_head=12, use_cache=False),
    _architecture("llama", "Llama, 768 wide, 6 layers", "LlamaModel", _tokens, **_DECODER),
    _architecture("qwen2", "Qwen2, 768 wide, 6 layers", "Qwen2Model", _tokens, **_DECODER),
    _architecture("bart", "BART-base, 3 + 3 layers", "BartModel", _translation,
                  vocab_size=VOCABULARY, d_model=768, encoder_layers=3, decoder_layers=3,
                  encoder_attention_heads=12, decoder_attention_heads=12, encoder_ffn_dim=3072,
                  decoder_ffn_dim=3072, use_cache=False),
    _architecture("vit", "ViT-base, 6 layers", "ViTModel", _images(), num_hidden_layers=6),
    _architecture("dinov2", "DINOv2-small, 6 layers", "Dinov2Model", _images(), hidden_size=384,
                  num_attention_heads=6, num_hidden_layers=6),
    _architecture("beit", "BEiT-base, 4 layers", "BeitModel", _images(), **_FOUR),
    _architecture("swin", "Swin-T", "SwinModel", _images()),
    _architecture("convnext", "ConvNeXt-T", "ConvNextModel", _images()),
    _architecture("resnet18", "ResNet-18", "ResNetModel", _images(), **_RESNET_18),
    _architecture("resnet50", "ResNet-50", "ResNetModel", _images()),
    _architecture("regnet", "RegNetY-4GF", "RegNetModel", _images()),
    _architecture("mobilenet_v1", "MobileNetV1", "MobileNetV1Model", _images()),
    _architecture("mobilenet_v2", "MobileNetV2", "MobileNetV2Model", _images()),
    _architecture("efficientnet", "EfficientNet-B0", "EfficientNetModel", _images(),
                  width_coefficient=1.0, depth_coefficient=1.0, hidden_dim=1280),
    _architecture("mobilevit", "MobileViT-S", "MobileViTModel", _images(256)),
    _architecture("poolformer", "PoolFormer-S12", "PoolFormerModel", _images()),
    _architecture("levit", "LeViT-128S", "LevitModel", _images()),
    _architecture("segformer", "SegFormer-B0, segmentation", "SegformerForSemanticSegmentation",
                  _images()),
    _architecture("detr", "DETR-ResNet-18, 3 + 3 layers, detection", "DetrForObjectDetection",
                  _images(320), use_timm_backbone=False, backbone=None,
                  use_pretrained_backbone=False, encoder_layers=3, decoder_layers=3,
                  backbone_config={"model_type": "resnet", **_RESNET_18,
                                   "out_features": ["stage4"]}),
    _architecture("yolos", "YOLOS-tiny, 6 layers, detection", "YolosForObjectDetection", _images(),
                  hidden_size=192, num_attention_heads=3, intermediate_size=768,
                  num_hidden_layers=6, image_size=[224, 224]),
    _architecture("wav2vec2", "Wav2Vec2-base, 4 layers, 1 s", "Wav2Vec2Model", _waves(), **_FOUR),
    _architecture("hubert", "HuBERT-base, 4 layers, 1 s", "HubertModel", _waves(), **_FOUR),
    _architecture("wavlm", "WavLM-base, 4 layers, 1 s", "WavLMModel", _waves(), **_FOUR),
    _architecture("whisper", "Whisper-tiny, encoder, 30 s", "WhisperForAudioClassification",
                  _spectrogram, d_model=384, encoder_layers=4, encoder_attention_heads=6,
                  encoder_ffn_dim=1536),
    _architecture("clip_vision", "CLIP-B/32, images, 6 layers", "CLIPVisionModel", _images(),
                  num_hidden_layers=6),
    _architecture("clip", "CLIP-B/32, 4 + 4 layers", "CLIPModel", _short_pairs,
                  text_config={**_FOUR, "vocab_size": VOCABULARY, "eos_token_id": 2},
                  vision_config=_FOUR),
    _architecture("vilt", "ViLT-B/32, 4 layers", "ViltModel", _short_pairs, **_FOUR,
                  vocab_size=VOCABULARY, image_size=IMAGE, max_image_length=-1),
    _network("unet", "U-Net, 128 x 128", UNet, lambda batch: (torch.randn(batch, 3, 128, 128),)),
    _network("tcn", "Temporal convolutions, 512 steps", TemporalNetwork,
             lambda batch: (torch.randn(batch, 128, 512),)),
    ("lstm", MODELS["lstm"]),
    ("dlrm", MODELS["dlrm"]),
])  # fmt: skip
"""Every model by name, in the order of the tables."""
