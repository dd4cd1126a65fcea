"""The models that `oxytorch bench zoo` times: real widths and inputs, fewer layers where all of
them would take too long.

All have random weights, and nothing is downloaded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oxytorch.benchmark.models.cases import CASES as MODELS
from oxytorch.benchmark.models.cases import (
    TOKENS,
    VOCABULARY,
    Draw,
    Inputs,
    ModelCase,
    architecture,
    images,
    named,
    network,
    tokens,
)

RATE = 16_000


def _translation(batch: int) -> Inputs:
    ids = torch.randint(3, VOCABULARY, (batch, TOKENS // 4))
    return {**named(tokens(batch)), "decoder_input_ids": ids}


def _waves(seconds: int = 1) -> Draw:
    return lambda batch: {"input_values": torch.randn(batch, seconds * RATE)}


def _spectrogram(batch: int) -> Inputs:
    """Thirty seconds in 80 bands, the one length that Whisper takes."""
    return {"input_features": torch.randn(batch, 80, 3000)}


def _short_pairs(batch: int) -> Inputs:
    """Images and captions of 32 tokens."""
    text = {name: tensor[:, :32] for name, tensor in named(tokens(batch)).items()}
    return {**text, **named(images()(batch))}


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
_RESNET_18: dict[str, Any] = {
    "depths": [2, 2, 2, 2],
    "hidden_sizes": [64, 128, 256, 512],
    "layer_type": "basic",
}
_FOUR = {"num_hidden_layers": 4}

ZOO: dict[str, ModelCase] = {case.name: case for case in (
    architecture("bert", "BERT-base, 6 layers", "BertModel", tokens, **_LAYERS),
    architecture("distilbert", "DistilBERT", "DistilBertModel", tokens, vocab_size=VOCABULARY),
    architecture("xlm_roberta", "XLM-RoBERTa-base, 6 layers", "XLMRobertaModel", tokens,
                  **_LAYERS, max_position_embeddings=514, pad_token_id=1),
    architecture("albert", "ALBERT-base, 6 layers", "AlbertModel", tokens, **_LAYERS,
                  hidden_size=768, num_attention_heads=12, intermediate_size=3072),
    architecture("electra", "ELECTRA-small", "ElectraModel", tokens, vocab_size=VOCABULARY),
    architecture("deberta", "DeBERTa-base, 4 layers", "DebertaModel", tokens,
                  vocab_size=VOCABULARY, **_FOUR, relative_attention=True,
                  pos_att_type=["c2p", "p2c"]),
    architecture("deberta_v2", "DeBERTa-v3-base, 4 layers", "DebertaV2Model", tokens,
                  vocab_size=VOCABULARY, **_FOUR, hidden_size=768, num_attention_heads=12,
                  intermediate_size=3072, relative_attention=True, position_buckets=256,
                  pos_att_type=["p2c", "c2p"], share_att_key=True, norm_rel_ebd="layer_norm"),
    architecture("mobilebert", "MobileBERT, 8 layers", "MobileBertModel", tokens,
                  vocab_size=VOCABULARY, num_hidden_layers=8),
    architecture("mpnet", "MPNet-base, 6 layers", "MPNetModel", tokens, **_LAYERS),
    architecture("convbert", "ConvBERT-base, 4 layers", "ConvBertModel", tokens,
                  vocab_size=VOCABULARY, **_FOUR),
    architecture("squeezebert", "SqueezeBERT, 6 layers", "SqueezeBertModel", tokens, **_LAYERS),
    architecture("modernbert", "ModernBERT-base, 8 layers", "ModernBertModel", tokens,
                  vocab_size=VOCABULARY, num_hidden_layers=8, pad_token_id=0, bos_token_id=1,
                  eos_token_id=2, cls_token_id=1, sep_token_id=2),
    architecture("xlnet", "XLNet-base, 4 layers", "XLNetModel", tokens, vocab_size=VOCABULARY,
                  n_layer=4, d_model=768, n_head=12, d_inner=3072, use_mems_eval=False),
    architecture("esm", "ESM-2 8M", "EsmModel", tokens, **_LAYERS, hidden_size=320,
                  num_attention_heads=20, intermediate_size=1280, pad_token_id=1,
                  position_embedding_type="rotary"),
    architecture("t5_encoder", "T5-small, encoder", "T5EncoderModel", tokens,
                  vocab_size=VOCABULARY, use_cache=False),
    architecture("gpt2", "GPT-2, 6 layers", "GPT2Model", tokens, vocab_size=VOCABULARY,
                  n_layer=6, use_cache=False),
    architecture("opt", "OPT-125M, 6 layers", "OPTModel", tokens, **_LAYERS, use_cache=False),
    architecture("bloom", "BLOOM, 768 wide, 4 layers", "BloomModel", tokens,
                  vocab_size=VOCABULARY, hidden_size=768, n_layer=4, n_head=12, use_cache=False),
    architecture("llama", "Llama, 768 wide, 6 layers", "LlamaModel", tokens, **_DECODER),
    architecture("qwen2", "Qwen2, 768 wide, 6 layers", "Qwen2Model", tokens, **_DECODER),
    architecture("bart", "BART-base, 3 + 3 layers", "BartModel", _translation,
                  vocab_size=VOCABULARY, d_model=768, encoder_layers=3, decoder_layers=3,
                  encoder_attention_heads=12, decoder_attention_heads=12, encoder_ffn_dim=3072,
                  decoder_ffn_dim=3072, use_cache=False),
    architecture("vit", "ViT-base, 6 layers", "ViTModel", images(), num_hidden_layers=6),
    architecture("dinov2", "DINOv2-small, 6 layers", "Dinov2Model", images(), hidden_size=384,
                  num_attention_heads=6, num_hidden_layers=6),
    architecture("beit", "BEiT-base, 4 layers", "BeitModel", images(), **_FOUR),
    architecture("swin", "Swin-T", "SwinModel", images()),
    architecture("convnext", "ConvNeXt-T", "ConvNextModel", images()),
    architecture("resnet18", "ResNet-18", "ResNetModel", images(), **_RESNET_18),
    architecture("resnet50", "ResNet-50", "ResNetModel", images()),
    architecture("regnet", "RegNetY-4GF", "RegNetModel", images()),
    architecture("mobilenet_v1", "MobileNetV1", "MobileNetV1Model", images()),
    architecture("mobilenet_v2", "MobileNetV2", "MobileNetV2Model", images()),
    architecture("efficientnet", "EfficientNet-B0", "EfficientNetModel", images(),
                  width_coefficient=1.0, depth_coefficient=1.0, hidden_dim=1280),
    architecture("mobilevit", "MobileViT-S", "MobileViTModel", images(256)),
    architecture("poolformer", "PoolFormer-S12", "PoolFormerModel", images()),
    architecture("levit", "LeViT-128S", "LevitModel", images()),
    architecture("segformer", "SegFormer-B0, segmentation", "SegformerForSemanticSegmentation",
                  images()),
    architecture("detr", "DETR-ResNet-18, 3 + 3 layers, detection", "DetrForObjectDetection",
                  images(320), use_timm_backbone=False, backbone=None,
                  use_pretrained_backbone=False, encoder_layers=3, decoder_layers=3,
                  backbone_config={"model_type": "resnet", **_RESNET_18,
                                   "out_features": ["stage4"]}),
    architecture("yolos", "YOLOS-tiny, 6 layers, detection", "YolosForObjectDetection", images(),
                  hidden_size=192, num_attention_heads=3, intermediate_size=768,
                  num_hidden_layers=6, image_size=[224, 224]),
    architecture("wav2vec2", "Wav2Vec2-base, 4 layers, 1 s", "Wav2Vec2Model", _waves(), **_FOUR),
    architecture("hubert", "HuBERT-base, 4 layers, 1 s", "HubertModel", _waves(), **_FOUR),
    architecture("wavlm", "WavLM-base, 4 layers, 1 s", "WavLMModel", _waves(), **_FOUR),
    architecture("whisper", "Whisper-tiny, encoder, 30 s", "WhisperForAudioClassification",
                  _spectrogram, d_model=384, encoder_layers=4, encoder_attention_heads=6,
                  encoder_ffn_dim=1536),
    architecture("clip_vision", "CLIP-B/32, images, 6 layers", "CLIPVisionModel", images(),
                  num_hidden_layers=6),
    architecture("clip", "CLIP-B/32, 4 + 4 layers", "CLIPModel", _short_pairs,
                  text_config={**_FOUR, "vocab_size": VOCABULARY, "eos_token_id": 2},
                  vision_config=_FOUR),
    architecture("vilt", "ViLT-B/32, 4 layers", "ViltModel", _short_pairs, **_FOUR,
                  vocab_size=VOCABULARY, image_size=224, max_image_length=-1),
    network("unet", "U-Net, 128 x 128", UNet, lambda batch: (torch.randn(batch, 3, 128, 128),)),
    network("tcn", "Temporal convolutions, 512 steps", TemporalNetwork,
             lambda batch: (torch.randn(batch, 128, 512),)),
    MODELS["lstm"],
    MODELS["dlrm"],
)}  # fmt: skip
"""Every model by name, in the order of the tables."""
