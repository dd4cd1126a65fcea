"""Models of sound, of several kinds of input at once, and of time series."""

from __future__ import annotations

from typing import Any

import torch
from building import Build, architecture, images, shape, tensors, together, tokens, waves

_SPEECH = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
    "conv_dim": [16, 16, 16], "conv_stride": [5, 2, 2], "conv_kernel": [10, 3, 3],
    "num_feat_extract_layers": 3, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2,
    "vocab_size": 30, "pad_token_id": 0,
}  # fmt: skip

_TEXT = {
    "vocab_size": 90, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64,
}  # fmt: skip

_VISION = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip

_LLAMA = {
    "model_type": "llama", **_TEXT, "num_key_value_heads": 1, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip

_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _speech(model: str, **settings: Any) -> Build:
    return architecture(model, waves(), **{**_SPEECH, **settings})


def _features(rows: int, frames: int = 16, name: str = "input_features") -> Any:
    """Spectrograms with `rows` first: [batch, rows, frames]."""
    return tensors(**{name: lambda which: torch.randn(2 + which, rows, frames)})


def _frames(size: int, frames: int = 16, name: str = "input_features") -> Any:
    """Spectrograms with `size` last: [batch, frames, size]."""
    return tensors(
        **{name: lambda which: torch.randn(2 + which, frames + 8 * which, size)}
    )  # fmt: skip


_answer = tensors(decoder_input_ids=lambda which: torch.randint(3, 30, (2 + which, 4 + which)))


def _whole_tokens(which: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 88, shape(which))
    ids[:, -1] = 2
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _with_image_tokens(token: int, count: int, size: int = 32, **more: Any) -> Any:
    """Ids of which the first `count` stand for parts of an image, and the image."""

    def inputs(which: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(3, 80, (2 + which, count + 6 + which))
        ids[:, :count] = token
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "pixel_values": torch.randn(2 + which, 3, size, size),
        }

    return inputs


SOUND: dict[str, Build] = {
    "audio_spectrogram_transformer": architecture(
        "ASTForAudioClassification", tensors(
            input_values=lambda which: torch.randn(2 + which, 24, 16)),
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
        patch_size=8, frequency_stride=8, time_stride=8, max_length=24, num_mel_bins=16,
        num_labels=3,
    ),
    "clap": architecture(
        "ClapModel",
        together(tokens, tensors(
            input_features=lambda which: torch.randn(2 + which, 1, 64, 16))),
        text_config={**_TEXT, "pad_token_id": 0, "projection_dim": 16}, projection_dim=16,
        audio_config={
            "spec_size": 32, "num_mel_bins": 16, "patch_size": 4, "patch_stride": [4, 4],
            "patch_embeds_hidden_size": 16, "depths": [1, 1], "num_attention_heads": [2, 2],
            "hidden_size": 32, "window_size": 4, "projection_dim": 16, "num_hidden_layers": 2,
            "enable_fusion": False,
        },
    ),
    "dac": architecture(
        "DacModel", tensors(input_values=lambda which: torch.randn(1 + which, 1, 640)),
        encoder_hidden_size=8, downsampling_ratios=[2, 4], decoder_hidden_size=32, n_codebooks=2,
        codebook_size=16, codebook_dim=4, upsampling_ratios=[4, 2], hidden_size=32,
    ),
    "data2vec_audio": _speech("Data2VecAudioModel", conv_pos_kernel_size=3),
    "encodec": architecture(
        "EncodecModel", tensors(input_values=lambda which: torch.randn(1 + which, 1, 640)),
        num_filters=4, hidden_size=16, upsampling_ratios=[4, 2], codebook_size=16,
        codebook_dim=16, target_bandwidths=[24.0], num_lstm_layers=1, kernel_size=3,
        last_kernel_size=3,
    ),
    "fastspeech2_conformer": architecture(
        "FastSpeech2ConformerModel", tensors(
            input_ids=lambda which: torch.randint(3, 30, (1 + which, 6))),
        hidden_size=32, vocab_size=30, num_mel_bins=8, encoder_num_attention_heads=2,
        encoder_layers=1, encoder_linear_units=48, decoder_layers=1, decoder_linear_units=48,
        decoder_num_attention_heads=2, speech_decoder_postnet_units=16,
        speech_decoder_postnet_layers=2, pitch_predictor_channels=16,
        energy_predictor_channels=16, duration_predictor_channels=16,
        positionwise_conv_kernel_size=3,
        encoder_kernel_size=3, decoder_kernel_size=7,
    ),
    "hubert": _speech("HubertForCTC", do_stable_layer_norm=True, feat_extract_norm="layer"),
    "mimi": architecture(
        "MimiModel", tensors(input_values=lambda which: torch.randn(1 + which, 1, 640)),
        num_filters=4, hidden_size=32, upsampling_ratios=[4, 2], codebook_size=16, codebook_dim=16,
        num_quantizers=2, num_semantic_quantizers=1, vector_quantization_hidden_dimension=16,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, intermediate_size=48,
        upsample_groups=32, sampling_rate=16000, frame_rate=None, kernel_size=3,
        last_kernel_size=3,
    ),
    "moonshine": architecture(
        "MoonshineModel", together(waves(2000), _answer), vocab_size=30, hidden_size=32,
        intermediate_size=48, encoder_num_hidden_layers=2, decoder_num_hidden_layers=2,
        encoder_num_attention_heads=2, decoder_num_attention_heads=2, max_position_embeddings=64,
        **_IDS,
    ),
    "musicgen": architecture(
        "MusicgenForCausalLM", tensors(
            input_ids=lambda which: torch.randint(0, 30, (4 * (1 + which), 6 + which))),
        vocab_size=30, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, ffn_dim=48,
        max_position_embeddings=64, num_codebooks=4,
    ),
    "parakeet": architecture(
        "ParakeetEncoder", _frames(16, 32), hidden_size=32, num_hidden_layers=2,
        num_attention_heads=2, intermediate_size=48, conv_kernel_size=3, subsampling_factor=4,
        subsampling_conv_channels=8, num_mel_bins=16,
    ),
    "seamless_m4t": architecture(
        "SeamlessM4TForTextToText", together(_whole_tokens, tensors(
            decoder_input_ids=lambda which: torch.randint(3, 88, (2 + which, 5)))),
        vocab_size=90, hidden_size=32, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=48,
        decoder_ffn_dim=48, encoder_attention_heads=2, decoder_attention_heads=2,
        max_position_embeddings=64, speech_encoder_layers=1, **_IDS, decoder_start_token_id=1,
    ),
    "sew": _speech("SEWModel", squeeze_factor=2),
    "sew_d": _speech(
        "SEWDModel", squeeze_factor=2, position_buckets=8, max_position_embeddings=64,
        pos_att_type=["p2c", "c2p"],
    ),
    "speech_to_text": architecture(
        "Speech2TextForConditionalGeneration", together(_frames(8, 24), _answer), vocab_size=30,
        d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=48, decoder_ffn_dim=48, conv_channels=32,
        input_feat_per_channel=8, max_source_positions=64, max_target_positions=64,
        decoder_start_token_id=1, **_IDS,
    ),
    "speecht5": architecture(
        "SpeechT5ForSpeechToText", together(waves(800), _answer),
        **{key: value for key, value in _SPEECH.items() if not key.startswith("num_hidden")},
        encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=48, decoder_ffn_dim=48, max_speech_positions=200, max_text_positions=64,
        decoder_start_token_id=1, bos_token_id=1, eos_token_id=2,
    ),
    "unispeech": _speech("UniSpeechModel"),
    "unispeech_sat": _speech("UniSpeechSatForSequenceClassification"),
    "univnet": architecture(
        "UnivNetModel", tensors(
            input_features=lambda which: torch.randn(1 + which, 12, 8),
            noise_sequence=lambda which: torch.randn(1 + which, 12, 8)),
        model_in_channels=8, model_hidden_channels=8, num_mel_bins=8,
        kernel_predictor_hidden_channels=8,
    ),
    "vits": architecture(
        "VitsModel", tensors(
            input_ids=lambda which: torch.randint(3, 30, (1 + which, 6))),
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, ffn_dim=24,
        flow_size=16, spectrogram_bins=9, upsample_initial_channel=16, upsample_rates=[4, 2],
        upsample_kernel_sizes=[8, 4], resblock_kernel_sizes=[3], resblock_dilation_sizes=[[1, 3]],
        posterior_encoder_num_wavenet_layers=2, prior_encoder_num_wavenet_layers=2,
        use_stochastic_duration_prediction=False, noise_scale=0.0,
    ),
    "wav2vec2": _speech("Wav2Vec2ForCTC"),
    "wav2vec2_bert": architecture(
        "Wav2Vec2BertModel", _frames(16, 24), hidden_size=32, num_hidden_layers=2,
        num_attention_heads=2, intermediate_size=48, feature_projection_input_dim=16,
        conv_depthwise_kernel_size=7, left_max_position_embeddings=8,
        right_max_position_embeddings=4,
    ),
    "wav2vec2_conformer": _speech("Wav2Vec2ConformerModel", conv_depthwise_kernel_size=7),
    "wavlm": _speech("WavLMModel", num_buckets=8, max_bucket_distance=16),
    "whisper": architecture(
        "WhisperForConditionalGeneration", together(_features(8, 32), _answer), vocab_size=30,
        d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8,
        max_source_positions=16, max_target_positions=16, decoder_start_token_id=1, **_IDS,
    ),
}  # fmt: skip

MULTIMODAL: dict[str, Build] = {
    "align": architecture(
        "AlignModel", together(tokens, images(32)),
        text_config={**_TEXT, "pad_token_id": 0}, projection_dim=80,
        vision_config={
            "width_coefficient": 0.25, "depth_coefficient": 0.3, "image_size": 32,
            "hidden_dim": 80,
        },
    ),
    "altclip": architecture(
        "AltCLIPModel", together(tokens, images(32)), projection_dim=16, vision_config=_VISION,
        text_config={**_TEXT, "pad_token_id": 0, "project_dim": 16},
    ),
    "blip": architecture(
        "BlipModel", together(tokens, images(32)), projection_dim=16,
        text_config={**_TEXT, **_IDS, "encoder_hidden_size": 32, "projection_dim": 16,
                     "sep_token_id": 2},
        vision_config=_VISION,
    ),
    "blip_2": architecture(
        "Blip2ForConditionalGeneration", _with_image_tokens(88, 4), vision_config=_VISION,
        qformer_config={**_TEXT, "encoder_hidden_size": 32}, num_query_tokens=4,
        image_token_index=88, text_config={
            "model_type": "opt", "vocab_size": 90, "hidden_size": 32, "num_hidden_layers": 2,
            "ffn_dim": 48, "num_attention_heads": 2, "max_position_embeddings": 64,
            "word_embed_proj_dim": 32, **_IDS,
        },
    ),
    "bridgetower": architecture(
        "BridgeTowerModel", together(tokens, images(32)), hidden_size=32, num_hidden_layers=2,
        num_attention_heads=2, text_config={**_TEXT, "pad_token_id": 0},
        vision_config={**_VISION, "hidden_size": 64},
    ),
    "chinese_clip": architecture(
        "ChineseCLIPModel", together(tokens, images(32)), projection_dim=16, text_config=_TEXT,
        vision_config=_VISION,
    ),
    "clip": architecture(
        "CLIPModel", together(_whole_tokens, images(32)), projection_dim=16,
        text_config={**_TEXT, **_IDS}, vision_config=_VISION,
    ),
    "clip_vision": architecture("CLIPVisionModelWithProjection", images(32), **_VISION),
    "flava": architecture(
        "FlavaModel", together(tokens, images(32)), hidden_size=32, text_config=_TEXT,
        image_config=_VISION, multimodal_config={**_VISION, "num_hidden_layers": 1},
    ),
    "git": architecture(
        "GitModel", together(_whole_tokens, images(32)), **_TEXT, **_IDS, vision_config=_VISION
    ),
    "groupvit": architecture(
        "GroupViTModel", together(_whole_tokens, images(32)), projection_dim=16,
        projection_intermediate_dim=24, text_config={**_TEXT, **_IDS},
        vision_config={
            **_VISION, "depths": [1, 1, 1], "num_hidden_layers": 3, "num_group_tokens": [8, 4, 0],
            "num_output_groups": [8, 4, 0],
        },
    ),
    "layoutlmv3": architecture(
        "LayoutLMv3Model",
        together(tokens, images(32), tensors(
            bbox=lambda which: torch.randint(0, 60, (*shape(which), 2)).repeat(1, 1, 2)
            .sort(-1).values)),
        **{**_TEXT, "hidden_size": 48}, coordinate_size=8, shape_size=8, input_size=32,
        patch_size=8, max_2d_position_embeddings=128, pad_token_id=0, rel_pos_bins=8,
        rel_2d_pos_bins=8,
    ),
    "llava": architecture(
        "LlavaForConditionalGeneration", _with_image_tokens(88, 16), text_config=_LLAMA,
        vision_config={"model_type": "clip_vision_model", **_VISION}, image_token_id=88,
        vision_feature_layer=-1,
    ),
    "lxmert": architecture(
        "LxmertModel",
        together(tokens, tensors(
            visual_feats=lambda which: torch.randn(2 + which, 4, 16),
            visual_pos=lambda which: torch.rand(2 + which, 4, 4))),
        **_TEXT, l_layers=2, x_layers=1, r_layers=1, visual_feat_dim=16,
    ),
    "paligemma": architecture(
        "PaliGemmaForConditionalGeneration",
        together(_with_image_tokens(88, 16), lambda which: {
            "token_type_ids": torch.zeros(2 + which, 22 + which, dtype=torch.int64)}),
        text_config={**_LLAMA, "model_type": "gemma", "head_dim": 16},
        vision_config={"model_type": "siglip_vision_model", **_VISION}, image_token_id=88,
        projection_dim=32,
    ),
    "perceiver_images": architecture(
        "PerceiverForImageClassificationLearned", tensors(
            inputs=lambda which: torch.randn(2 + which, 3, 32, 32)),
        num_latents=8, d_latents=32, num_blocks=1, num_self_attends_per_block=2,
        num_self_attention_heads=2, num_cross_attention_heads=1, image_size=32, num_labels=3,
    ),
    "pix2struct": architecture(
        "Pix2StructForConditionalGeneration",
        tensors(
            flattened_patches=lambda which: torch.cat(
                [torch.randint(1, 8, (2 + which, 6, 2)).float(), torch.randn(2 + which, 6, 48)], -1
            ),
            decoder_input_ids=lambda which: torch.randint(3, 88, (2 + which, 5)),
        ),
        text_config={
            "vocab_size": 90, "hidden_size": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2,
            "num_heads": 2,
        },
        vision_config={
            "hidden_size": 32, "patch_embed_hidden_size": 48, "d_ff": 48, "d_kv": 16,
            "num_hidden_layers": 2, "num_attention_heads": 2, "seq_len": 16,
        },
    ),
    "qwen2_vl": architecture(
        "Qwen2VLTextModel", tokens, **{**_TEXT, "num_key_value_heads": 1},
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    ),
    "siglip": architecture(
        "SiglipModel", together(_whole_tokens, images(32)),
        text_config={**_TEXT, **_IDS, "projection_size": 32}, vision_config=_VISION,
    ),
    "speech_encoder_decoder": architecture(
        "SpeechEncoderDecoderModel", together(waves(), _answer),
        encoder={"model_type": "wav2vec2", **_SPEECH},
        decoder={"model_type": "bert", **_TEXT, "is_decoder": True, "add_cross_attention": True},
    ),
    "vilt": architecture(
        "ViltModel", together(tokens, images(32)), **{**_TEXT, **_VISION}, max_image_length=-1
    ),
    "vision_encoder_decoder": architecture(
        "VisionEncoderDecoderModel", together(images(32), _answer),
        encoder={"model_type": "vit", **_VISION},
        decoder={"model_type": "gpt2", "vocab_size": 90, "n_embd": 32, "n_layer": 2, "n_head": 2,
                 "n_positions": 64, "add_cross_attention": True},
    ),
    "visual_bert": architecture(
        "VisualBertModel",
        together(tokens, tensors(visual_embeds=lambda which: torch.randn(2 + which, 4, 16))),
        **_TEXT, visual_embedding_dim=16,
    ),
    "x_clip": architecture(
        "XCLIPModel",
        together(_whole_tokens, tensors(
            pixel_values=lambda which: torch.randn(2 + which, 2, 3, 32, 32))),
        text_config={**_TEXT, **_IDS}, projection_dim=32, prompt_num_attention_heads=2,
        vision_config={
            **_VISION, "num_frames": 2, "mit_hidden_size": 32, "mit_intermediate_size": 48,
            "mit_num_hidden_layers": 1, "mit_num_attention_heads": 2,
        },
    ),
}  # fmt: skip


def _series(which: int) -> dict[str, torch.Tensor]:
    batch = 2 + which
    return {
        "past_values": torch.randn(batch, 19),
        "past_time_features": torch.randn(batch, 19, 2),
        "past_observed_mask": torch.ones(batch, 19),
        "future_values": torch.randn(batch, 6),
        "future_time_features": torch.randn(batch, 6, 2),
    }


_SERIES = {
    "prediction_length": 6, "context_length": 12, "lags_sequence": [1, 3, 7],
    "num_time_features": 2, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
}  # fmt: skip

SERIES: dict[str, Build] = {
    "autoformer": architecture("AutoformerModel", _series, **_SERIES, moving_average=5),
    "decision_transformer": architecture(
        "DecisionTransformerModel",
        tensors(
            states=lambda which: torch.randn(2 + which, 4, 5),
            actions=lambda which: torch.randn(2 + which, 4, 3),
            rewards=lambda which: torch.randn(2 + which, 4, 1),
            returns_to_go=lambda which: torch.randn(2 + which, 4, 1),
            timesteps=lambda which: torch.arange(4).repeat(2 + which, 1),
            attention_mask=lambda which: torch.ones(2 + which, 4, dtype=torch.int64),
        ),
        state_dim=5, act_dim=3, hidden_size=32, n_layer=2, n_head=2, max_ep_len=16,
        n_positions=64,
    ),
    "informer": architecture("InformerModel", _series, **_SERIES, attention_type="full"),
    "patchtsmixer": architecture(
        "PatchTSMixerForPrediction",
        tensors(past_values=lambda which: torch.randn(2 + which, 32, 3)), context_length=32,
        patch_length=8, patch_stride=8, num_input_channels=3, d_model=16, num_layers=2,
        prediction_length=8, mode="mix_channel", gated_attn=True,
    ),
    "patchtst": architecture(
        "PatchTSTForPrediction",
        tensors(past_values=lambda which: torch.randn(2 + which, 32, 3)), context_length=32,
        patch_length=8, patch_stride=8, num_input_channels=3, d_model=16, num_hidden_layers=2,
        num_attention_heads=2, ffn_dim=32, prediction_length=8, do_mask_input=False,
    ),
    "time_series_transformer": architecture("TimeSeriesTransformerModel", _series, **_SERIES),
}  # fmt: skip

OTHER: dict[str, Build] = {**SOUND, **MULTIMODAL, **SERIES}
