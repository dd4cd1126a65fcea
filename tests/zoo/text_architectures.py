"""Encoders, decoders, encoder-decoders and state-space models of text."""

from __future__ import annotations

from typing import Any

import torch
from building import (
    Build,
    Inputs,
    architecture,
    fixed_length,
    ids_only,
    of_length,
    shape,
    tensors,
    together,
    tokens,
    translation,
)

_SIZES = {
    "vocab_size": 90,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}


def _encoder(model: str, inputs: Inputs = tokens, **settings: Any) -> Build:
    return architecture(model, inputs, **{**_SIZES, **settings})


def _decoder(model: str, inputs: Inputs = tokens, **settings: Any) -> Build:
    return architecture(
        model,
        inputs,
        **{**_SIZES, "num_key_value_heads": 1, "pad_token_id": 0, "bos_token_id": 1,
           "eos_token_id": 2, **settings},
    )  # fmt: skip


def _experts(model: str, **settings: Any) -> Build:
    return _decoder(model, **{"num_experts": 4, "num_experts_per_tok": 2, **settings})


def _translator(model: str, inputs: Inputs = translation, **settings: Any) -> Build:
    sizes = {
        "vocab_size": 90, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48, "max_position_embeddings": 64, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    }  # fmt: skip
    return architecture(model, inputs, **{**sizes, **settings})


_T5 = {
    "vocab_size": 90, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2,
    "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0,
}  # fmt: skip

_boxes = tensors(
    bbox=lambda which: torch.randint(0, 60, (*shape(which), 2)).repeat(1, 1, 2).sort(-1).values
)

ENCODERS: dict[str, Build] = {
    "albert": _encoder("AlbertModel", embedding_size=16),
    "bert": _encoder("BertForSequenceClassification", num_labels=3),
    "bert_generation": _encoder("BertGenerationEncoder"),
    "big_bird": _encoder("BigBirdModel", attention_type="original_full"),
    "camembert": _encoder("CamembertModel", pad_token_id=0),
    "canine": _encoder(
        "CanineModel", of_length(16), num_hash_functions=2, num_hash_buckets=64,
        local_transformer_stride=8, downsampling_rate=4, max_position_embeddings=128,
        upsampling_kernel_size=4,
    ),
    "convbert": _encoder("ConvBertModel", embedding_size=32, conv_kernel_size=3, head_ratio=1),
    "data2vec_text": _encoder("Data2VecTextModel", pad_token_id=0),
    "deberta": _encoder(
        "DebertaModel", relative_attention=True, pos_att_type=["c2p", "p2c"],
        max_relative_positions=16,
    ),
    "deberta_v2": _encoder(
        "DebertaV2ForTokenClassification", relative_attention=True, pos_att_type=["c2p", "p2c"],
        position_buckets=8, norm_rel_ebd="layer_norm", share_att_key=True, num_labels=4,
    ),
    "distilbert": architecture(
        "DistilBertForQuestionAnswering", tokens, vocab_size=90, dim=32, hidden_dim=48, n_layers=2,
        n_heads=2, max_position_embeddings=64,
    ),
    "electra": _encoder("ElectraForPreTraining", embedding_size=16),
    "ernie": _encoder("ErnieModel", use_task_id=True),
    "esm": _encoder(
        "EsmModel", position_embedding_type="rotary", pad_token_id=0, mask_token_id=1,
        token_dropout=True,
    ),
    "eurobert": _encoder("EuroBertModel", num_key_value_heads=2, pad_token_id=0),
    "flaubert": architecture(
        "FlaubertModel", tokens, vocab_size=90, emb_dim=32, n_layers=2, n_heads=2,
        max_position_embeddings=64, pad_index=0,
    ),
    "fnet": _encoder("FNetModel", ids_only),
    "funnel": architecture(
        "FunnelModel", tokens, vocab_size=90, block_sizes=[1, 2], num_decoder_layers=1, d_model=32,
        n_head=2, d_head=16, d_inner=48,
    ),
    "ibert": _encoder("IBertModel", pad_token_id=0),
    "layoutlm": _encoder("LayoutLMModel", together(tokens, _boxes), max_2d_position_embeddings=128),
    "lilt": _encoder(
        "LiltModel", together(tokens, _boxes), max_2d_position_embeddings=128, pad_token_id=0,
        channel_shrink_ratio=4, hidden_size=48,
    ),
    "longformer": _encoder("LongformerModel", of_length(8), attention_window=4, pad_token_id=0),
    "luke": _encoder("LukeModel", entity_vocab_size=20, entity_emb_size=16, pad_token_id=0),
    "megatron_bert": _encoder("MegatronBertModel"),
    "mobilebert": _encoder(
        "MobileBertModel", embedding_size=16, intra_bottleneck_size=16, num_feedforward_networks=2
    ),
    "modernbert": _encoder(
        "ModernBertModel", global_attn_every_n_layers=2, local_attention=8, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
    ),
    "mpnet": _encoder("MPNetForMaskedLM", pad_token_id=0),
    "mra": _encoder("MraModel", of_length(32), block_per_row=1, pad_token_id=0),
    "nomic_bert": _encoder("NomicBertModel", pad_token_id=0),
    "nystromformer": _encoder(
        "NystromformerModel", fixed_length(16), num_landmarks=4, segment_means_seq_len=16,
    ),
    "perceiver": architecture(
        "PerceiverForMaskedLM", tokens, vocab_size=90, num_latents=8, d_latents=32, d_model=16,
        num_blocks=1, num_self_attends_per_block=2, num_self_attention_heads=2,
        num_cross_attention_heads=2, max_position_embeddings=16, qk_channels=16, v_channels=32,
    ),
    "reformer": architecture(
        "ReformerModel", of_length(8), vocab_size=90, attention_head_size=16, hidden_size=32,
        num_attention_heads=2, feed_forward_size=48, attn_layers=["local", "local"],
        local_attn_chunk_length=4, axial_pos_shape=[4, 4], axial_pos_embds_dim=[16, 16],
        max_position_embeddings=16, is_decoder=False,
    ),
    "rembert": _encoder("RemBertModel", input_embedding_size=16, output_embedding_size=16),
    "roberta": _encoder("RobertaForMaskedLM", pad_token_id=0),
    "roberta_prelayernorm": _encoder("RobertaPreLayerNormModel", pad_token_id=0),
    "roc_bert": _encoder(
        "RoCBertModel", pronunciation_vocab_size=90, shape_vocab_size=90,
        pronunciation_embed_dim=8, shape_embed_dim=8,
    ),
    "roformer": _encoder("RoFormerModel", embedding_size=16),
    "splinter": _encoder("SplinterModel"),
    "squeezebert": _encoder(
        "SqueezeBertModel", embedding_size=32, q_groups=2, k_groups=2, v_groups=2,
        post_attention_groups=1, intermediate_groups=4, output_groups=4,
    ),
    "tapas": _encoder(
        "TapasModel",
        together(tokens, tensors(
            token_type_ids=lambda which: torch.randint(0, 2, (*shape(which), 7)))),
        type_vocab_sizes=[3, 16, 16, 2, 16, 16, 10],
    ),
    "xlm": architecture(
        "XLMModel", tokens, vocab_size=90, emb_dim=32, n_layers=2, n_heads=2,
        max_position_embeddings=64, pad_index=0,
    ),
    "xlm_roberta": _encoder("XLMRobertaForSequenceClassification", pad_token_id=0),
    "xlm_roberta_xl": _encoder("XLMRobertaXLModel", pad_token_id=0),
    "xlnet": architecture(
        "XLNetModel", tokens, vocab_size=90, d_model=32, n_layer=2, n_head=2, d_inner=48
    ),
    "xmod": _encoder("XmodModel", pad_token_id=0, languages=["a", "b"], default_language="a"),
    "yoso": _encoder("YosoModel", use_expectation=True, pad_token_id=0),
}  # fmt: skip

DECODERS: dict[str, Build] = {
    "biogpt": _decoder("BioGptModel"),
    "bitnet": _decoder("BitNetModel"),
    "bloom": architecture(
        "BloomForCausalLM", tokens, vocab_size=90, hidden_size=32, n_layer=2, n_head=2,
    ),
    "codegen": architecture(
        "CodeGenModel", tokens, vocab_size=90, n_embd=32, n_layer=2, n_head=4, rotary_dim=4,
        n_positions=64,
    ),
    "cohere": _decoder("CohereForCausalLM"),
    "ctrl": architecture(
        "CTRLModel", tokens, vocab_size=90, n_embd=32, n_layer=2, n_head=2, dff=48, n_positions=64,
    ),
    "dbrx": architecture(
        "DbrxModel", tokens, vocab_size=90, d_model=32, n_heads=2, n_layers=2, max_seq_len=64,
        attn_config={"kv_n_heads": 1, "clip_qkv": 8.0, "rope_theta": 1e4},
        ffn_config={"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    ),
    "deepseek_v2": _decoder(
        "DeepseekV2Model", num_key_value_heads=2, kv_lora_rank=8, q_lora_rank=8, qk_nope_head_dim=8,
        qk_rope_head_dim=8, v_head_dim=16, n_routed_experts=4, n_shared_experts=1,
        num_experts_per_tok=2, moe_intermediate_size=16, first_k_dense_replace=1, n_group=1,
        topk_group=1, topk_method="greedy",
    ),
    "exaone4": _decoder("Exaone4Model", sliding_window=8),
    "falcon": architecture(
        "FalconModel", tokens, vocab_size=90, hidden_size=32, num_hidden_layers=2,
        num_attention_heads=2, multi_query=True, parallel_attn=True,
    ),
    "gemma": _decoder("GemmaModel", head_dim=16),
    "gemma2": _decoder(
        "Gemma2ForCausalLM", head_dim=16, sliding_window=4, query_pre_attn_scalar=16,
    ),
    "gemma3": _decoder(
        "Gemma3ForCausalLM", head_dim=16, sliding_window=4, query_pre_attn_scalar=16,
    ),
    "glm": _decoder("GlmModel", head_dim=16),
    "glm4": _decoder("Glm4Model", head_dim=16),
    "gpt2": architecture(
        "GPT2LMHeadModel", tokens, vocab_size=90, n_embd=32, n_layer=2, n_head=2, n_positions=64,
    ),
    "gpt_bigcode": architecture(
        "GPTBigCodeModel", tokens, vocab_size=90, n_embd=32, n_layer=2, n_head=2, n_positions=64
    ),
    "gpt_neo": architecture(
        "GPTNeoForCausalLM", tokens, vocab_size=90, hidden_size=32, num_layers=2, num_heads=2,
        intermediate_size=48, max_position_embeddings=64, window_size=4,
        attention_types=[[["global", "local"], 1]],
    ),
    "gpt_neox": _decoder("GPTNeoXForCausalLM"),
    "gpt_oss": _decoder(
        "GptOssModel", head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8
    ),
    "gptj": architecture(
        "GPTJModel", tokens, vocab_size=90, n_embd=32, n_layer=2, n_head=2, rotary_dim=4,
        n_positions=64,
    ),
    "granite": _decoder("GraniteForCausalLM", residual_multiplier=0.5, attention_multiplier=0.2),
    "helium": _decoder("HeliumModel", head_dim=16),
    "jetmoe": _decoder(
        "JetMoeModel", kv_channels=16, num_local_experts=4, num_experts_per_tok=2,
        num_key_value_heads=1,
    ),
    "llama": _decoder("LlamaForCausalLM"),
    "mistral": _decoder("MistralForCausalLM", sliding_window=4),
    "mixtral": _decoder("MixtralForCausalLM", num_local_experts=4, num_experts_per_tok=2),
    "mpt": architecture(
        "MptModel", tokens, vocab_size=90, d_model=32, n_heads=2, n_layers=2, max_seq_len=64,
    ),
    "nemotron": _decoder("NemotronModel"),
    "olmo": _decoder("OlmoModel", clip_qkv=4.0),
    "olmo2": _decoder("Olmo2Model"),
    "olmoe": _experts("OlmoeModel"),
    "openai": architecture(
        "OpenAIGPTModel", tokens, vocab_size=90, n_embd=32, n_layer=2, n_head=2, n_positions=64,
    ),
    "opt": architecture(
        "OPTForCausalLM", tokens, vocab_size=90, hidden_size=32, num_hidden_layers=2, ffn_dim=48,
        num_attention_heads=2, max_position_embeddings=64, word_embed_proj_dim=16,
        do_layer_norm_before=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    ),
    "persimmon": _decoder("PersimmonModel"),
    "phi": _decoder("PhiForCausalLM", qk_layernorm=True),
    "phi3": _decoder("Phi3ForCausalLM", num_key_value_heads=2),
    "qwen2": _decoder("Qwen2ForCausalLM"),
    "qwen2_moe": _experts(
        "Qwen2MoeModel", moe_intermediate_size=16, shared_expert_intermediate_size=24
    ),
    "qwen3": _decoder("Qwen3ForCausalLM", head_dim=16),
    "qwen3_moe": _experts("Qwen3MoeForCausalLM", head_dim=16, moe_intermediate_size=16),
    "smollm3": _decoder("SmolLM3Model", no_rope_layer_interval=2),
    "stablelm": _decoder("StableLmModel", use_qkv_bias=True),
    "starcoder2": _decoder("Starcoder2Model", sliding_window=8),
    "xglm": architecture(
        "XGLMModel", tokens, vocab_size=90, d_model=32, num_layers=2, attention_heads=2,
        ffn_dim=48, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    ),
}  # fmt: skip

STATE_SPACE: dict[str, Build] = {
    "bamba": _decoder(
        "BambaModel", attn_layer_indices=[1], mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8,
        mamba_n_groups=1, mamba_chunk_size=8, mamba_expand=2,
    ),
    "falcon_mamba": architecture(
        "FalconMambaModel", tokens, vocab_size=90, hidden_size=32, state_size=4,
        num_hidden_layers=2,
    ),
    "jamba": _decoder(
        "JambaModel", attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2,
        expert_layer_offset=1, num_experts=2, num_experts_per_tok=1, mamba_d_state=4,
        use_mamba_kernels=False,
    ),
    "lfm2": _decoder("Lfm2Model", layer_types=["conv", "full_attention"], block_multiple_of=16),
    "mamba": architecture(
        "MambaForCausalLM", tokens, vocab_size=90, hidden_size=32, state_size=4,
        num_hidden_layers=2,
    ),
    "mamba2": architecture(
        "Mamba2Model", tokens, vocab_size=90, hidden_size=32, state_size=8, num_hidden_layers=2,
        num_heads=4, head_dim=16, n_groups=1, chunk_size=8, expand=2,
    ),
    "minimax": _decoder(
        "MiniMaxModel", head_dim=16, num_local_experts=2, num_experts_per_tok=1, block_size=4,
        layer_types=["linear_attention", "full_attention"],
    ),
    "qwen3_next": _experts(
        "Qwen3NextModel", head_dim=16, moe_intermediate_size=16, shared_expert_intermediate_size=16,
        linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=16,
        linear_value_head_dim=16, layer_types=["linear_attention", "full_attention"],
    ),
    "recurrent_gemma": _decoder(
        "RecurrentGemmaModel", head_dim=16, lru_width=32, attention_window_size=8,
        block_types=["recurrent", "attention"],
    ),
    "rwkv": architecture(
        "RwkvModel", tokens, vocab_size=90, hidden_size=32, num_hidden_layers=2,
        attention_hidden_size=32, intermediate_size=48,
    ),
    "xlstm": architecture(
        "xLSTMModel", tokens, vocab_size=90, hidden_size=64, num_hidden_layers=2, num_heads=2,
        chunk_size=8, qk_dim_factor=1.0,
    ),
    "zamba2": _decoder(
        "Zamba2Model", layers_block_type=["mamba", "hybrid"], mamba_d_state=8, n_mamba_heads=4,
        mamba_headdim=16, mamba_ngroups=1, chunk_size=8, use_mem_rope=True, num_mem_blocks=1,
        attention_hidden_size=64, num_key_value_heads=2,
    ),
}  # fmt: skip

TRANSLATORS: dict[str, Build] = {
    "bart": _translator("BartModel"),
    "bigbird_pegasus": _translator("BigBirdPegasusModel", attention_type="original_full"),
    "blenderbot": _translator("BlenderbotModel"),
    "blenderbot_small": _translator("BlenderbotSmallModel"),
    "encoder_decoder": architecture(
        "EncoderDecoderModel", translation,
        encoder={"model_type": "bert", **_SIZES},
        decoder={"model_type": "bert", **_SIZES, "is_decoder": True, "add_cross_attention": True},
    ),
    "fsmt": _translator(
        "FSMTModel", langs=["en", "de"], src_vocab_size=90, tgt_vocab_size=90
    ),
    "led": _translator(
        "LEDModel", attention_window=4, max_encoder_position_embeddings=64,
        max_decoder_position_embeddings=64,
    ),
    "longt5": architecture("LongT5Model", translation, **_T5, local_radius=4),
    "m2m_100": _translator("M2M100Model"),
    "marian": _translator("MarianMTModel"),
    "mbart": _translator("MBartForConditionalGeneration"),
    "mt5": architecture("MT5Model", translation, **_T5),
    "mvp": _translator("MvpModel", use_prompt=True, prompt_length=4, prompt_mid_dim=8),
    "nllb_moe": _translator(
        "NllbMoeModel", num_experts=2, encoder_sparse_step=2, decoder_sparse_step=2,
        expert_capacity=16,
    ),
    "pegasus": _translator("PegasusModel"),
    "pegasus_x": _translator("PegasusXModel", block_size=8, num_global_tokens=2),
    "plbart": _translator("PLBartModel"),
    "prophetnet": architecture(
        "ProphetNetModel", translation, vocab_size=90, hidden_size=32, encoder_ffn_dim=48,
        num_encoder_layers=2, num_encoder_attention_heads=2, decoder_ffn_dim=48,
        num_decoder_layers=2, num_decoder_attention_heads=2, max_position_embeddings=64,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, ngram=2, num_buckets=8,
        relative_max_distance=16,
    ),
    "switch_transformers": architecture(
        "SwitchTransformersModel", translation, **_T5, num_experts=2, num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1, expert_capacity=16,
    ),
    "t5": architecture("T5ForConditionalGeneration", translation, **_T5),
    "t5_gated": architecture("T5EncoderModel", tokens, **_T5, feed_forward_proj="gated-gelu"),
    "umt5": architecture("UMT5Model", translation, **_T5),
}  # fmt: skip

TEXT: dict[str, Build] = {**ENCODERS, **DECODERS, **STATE_SPACE, **TRANSLATORS}
