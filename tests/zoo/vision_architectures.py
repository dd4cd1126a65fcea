"""Models of images and videos: classification, detection, segmentation, depth, super-resolution."""

from __future__ import annotations

from typing import Any

import torch
from building import Build, architecture, images, tensors, together

_VIT = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip

_RESNET: dict[str, Any] = {
    "model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16, 24, 32],
    "depths": [1, 1, 1, 1], "layer_type": "basic", "out_features": ["stage2", "stage3", "stage4"],
}  # fmt: skip

_SWIN: dict[str, Any] = {
    "model_type": "swin", "image_size": 64, "patch_size": 4, "embed_dim": 16, "depths": [1, 1, 1,
    1],
    "num_heads": [1, 2, 2, 2], "window_size": 2,
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}  # fmt: skip

_RT_DETR: dict[str, Any] = {
    "backbone_config": {**_RESNET, "model_type": "rt_detr_resnet"}, "encoder_hidden_dim": 32,
    "encoder_in_channels": [16, 24, 32], "encoder_ffn_dim": 48, "encoder_attention_heads": 2,
    "d_model": 32, "num_queries": 6, "decoder_in_channels": [32, 32, 32], "decoder_ffn_dim": 48,
    "decoder_layers": 2, "decoder_attention_heads": 2, "num_labels": 3, "num_denoising": 0,
}  # fmt: skip

_DETR: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_queries": 5,
    "num_labels": 3, "use_timm_backbone": False, "use_pretrained_backbone": False,
    "backbone": None, "backbone_config": {**_RESNET, "out_features": ["stage4"]},
}  # fmt: skip


def _vit(model: str, **settings: Any) -> Build:
    return architecture(model, images(32), **{**_VIT, **settings})


def _videos(which: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(2 + which, 4, 3, 32, 32)}


_vitdet = {"model_type": "vitdet", **_VIT, "image_size": 64, "pretrain_image_size": 64}

CLASSIFIERS: dict[str, Build] = {
    "beit": _vit("BeitForImageClassification", use_relative_position_bias=True, num_labels=3),
    "bit": architecture(
        "BitModel", images(32, 48), embedding_size=8, hidden_sizes=[32, 64], depths=[1, 2],
        num_groups=2,
    ),
    "convnext": architecture(
        "ConvNextForImageClassification", images(32, 64), hidden_sizes=[8, 16, 24, 32],
        depths=[1, 1, 2, 1], layer_scale_init_value=0.5, num_labels=3,
    ),
    "convnextv2": architecture(
        "ConvNextV2Model", images(32, 64), hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 2, 1]
    ),
    "cvt": architecture(
        "CvtModel", images(32, 48), embed_dim=[8, 16, 32], num_heads=[1, 2, 2], depth=[1, 2, 3]
    ),
    "data2vec_vision": _vit("Data2VecVisionModel"),
    "deit": _vit("DeiTForImageClassificationWithTeacher", num_labels=3),
    "dinov2": _vit("Dinov2Model", layerscale_value=0.5),
    "dinov2_with_registers": _vit("Dinov2WithRegistersModel", num_register_tokens=2),
    "dinov3_convnext": architecture(
        "DINOv3ConvNextModel", images(32, 64), hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1]
    ),
    "dinov3_vit": _vit("DINOv3ViTModel", num_register_tokens=2),
    "efficientnet": architecture(
        "EfficientNetForImageClassification", images(32, 48), width_coefficient=0.25,
        depth_coefficient=0.3, image_size=32, hidden_dim=320, num_labels=3,
    ),
    "focalnet": architecture(
        "FocalNetForImageClassification", images(32, 64), image_size=32, embed_dim=16,
        depths=[1, 1], focal_levels=[2, 2], focal_windows=[3, 3], hidden_sizes=[16, 32],
        num_labels=3,
    ),
    "hgnet_v2": architecture(
        "HGNetV2ForImageClassification", images(64, 96), embedding_size=8,
        hidden_sizes=[16, 32, 48, 64], stem_channels=[3, 8, 16], stage_in_channels=[16, 32, 48, 64],
        stage_mid_channels=[8, 8, 16, 16], stage_out_channels=[32, 48, 64, 64],
        stage_num_blocks=[1, 1, 1, 1], stage_numb_of_layers=[2, 2, 2, 2], depths=[1, 1, 1, 1],
        num_labels=3,
    ),
    "hiera": architecture(
        "HieraModel", images(32), image_size=[32, 32], embed_dim=16, depths=[1, 1, 1],
        num_heads=[1, 2, 4], num_layers=3, query_stride=[2, 2], masked_unit_size=[4, 4],
        masked_unit_attention=[True, False, False], num_query_pool=2, patch_stride=[4, 4],
        patch_size=[7, 7],
    ),
    "ijepa": _vit("IJepaModel"),
    "levit": architecture(
        "LevitForImageClassificationWithTeacher", images(64), image_size=64,
        hidden_sizes=[16, 32, 48], num_attention_heads=[2, 2, 3], depths=[1, 1, 1],
        key_dim=[8, 8, 8], mlp_ratio=[2, 2, 2], attention_ratio=[2, 2, 2], num_labels=3,
        down_ops=[["Subsample", 8, 2, 4, 2, 2], ["Subsample", 8, 4, 4, 2, 2]],
    ),
    "mobilenet_v1": architecture("MobileNetV1Model", images(32, 64), depth_multiplier=0.25),
    "mobilenet_v2": architecture(
        "MobileNetV2ForImageClassification", images(32, 64), depth_multiplier=0.25, num_labels=3
    ),
    "mobilevit": architecture(
        "MobileViTForImageClassification", images(32, 64), image_size=32, num_labels=3,
        hidden_sizes=[16, 24, 32], neck_hidden_sizes=[8, 8, 16, 16, 24, 24, 64],
        intermediate_size=48, num_attention_heads=2,
    ),
    "mobilevitv2": architecture(
        "MobileViTV2Model", images(64, 96), image_size=64, width_multiplier=0.25,
        base_attn_unit_dims=[16, 24, 32],
    ),
    "poolformer": architecture(
        "PoolFormerForImageClassification", images(32, 64), hidden_sizes=[8, 16, 24, 32],
        depths=[1, 1, 1, 1], layer_scale_init_value=0.5, num_labels=3,
    ),
    "pvt": architecture(
        "PvtModel", images(32), image_size=32, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 2, 2], sequence_reduction_ratios=[4, 2, 1, 1],
        mlp_ratios=[2, 2, 2, 2],
    ),
    "pvt_v2": architecture(
        "PvtV2Model", images(32, 64), image_size=32, hidden_sizes=[8, 16, 24, 32],
        depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 2], mlp_ratios=[2, 2, 2, 2],
    ),
    "regnet": architecture(
        "RegNetForImageClassification", images(32, 48), embedding_size=8,
        hidden_sizes=[16, 32, 48], depths=[1, 2, 1], groups_width=8, layer_type="y", num_labels=3,
    ),
    "resnet": architecture(
        "ResNetForImageClassification", images(32, 48), embedding_size=8, hidden_sizes=[16, 32],
        depths=[1, 2], num_labels=3,
    ),
    "swiftformer": architecture(
        "SwiftFormerModel", images(32, 64), embed_dims=[8, 16, 24, 32], depths=[1, 1, 1, 1],
        layer_scale_init_value=0.5,
    ),
    "swin": architecture("SwinForImageClassification", images(64), **{**_SWIN, "num_labels": 3}),
    "swinv2": architecture("Swinv2Model", images(64), **{**_SWIN, "model_type": "swinv2"}),
    "textnet": architecture(
        "TextNetModel", images(32, 64), stem_num_channels=3, stem_out_channels=8,
        hidden_sizes=[8, 8, 16, 16, 16],
        conv_layer_kernel_sizes=[[[3, 3]], [[3, 1]], [[1, 3]], [[3, 3]]],
        conv_layer_strides=[[2], [2], [1], [2]],
    ),
    "timesformer": architecture(
        "TimesformerModel", _videos, **_VIT, num_frames=4
    ),
    "videomae": architecture("VideoMAEModel", _videos, **_VIT, num_frames=4, tubelet_size=2),
    "vit": _vit("ViTForImageClassification", num_labels=3),
    "vit_msn": _vit("ViTMSNModel"),
    "vivit": architecture("VivitModel", _videos, **_VIT, num_frames=4, tubelet_size=[2, 8, 8]),
    "vjepa2": architecture(
        "VJEPA2Model",
        tensors(pixel_values_videos=lambda which: torch.randn(2 + which, 4, 3, 32, 32)),
        **_VIT, crop_size=32, frames_per_clip=4, tubelet_size=2, mlp_ratio=2.0,
        pred_hidden_size=32, pred_num_attention_heads=2, pred_num_hidden_layers=1,
        pred_num_mask_tokens=2,
    ),
}  # fmt: skip

DETECTORS: dict[str, Build] = {
    "conditional_detr": architecture("ConditionalDetrForObjectDetection", images(64, 96), **_DETR),
    "d_fine": architecture(
        "DFineForObjectDetection", images(64),
        backbone_config={
            "model_type": "hgnet_v2", "embedding_size": 8, "hidden_sizes": [32, 48, 64, 64],
            "stem_channels": [3, 8, 16], "stage_in_channels": [16, 32, 48, 64],
            "stage_mid_channels": [8, 8, 16, 16], "stage_out_channels": [32, 48, 64, 64],
            "stage_num_blocks": [1, 1, 1, 1], "stage_numb_of_layers": [1, 1, 1, 1],
            "depths": [1, 1, 1, 1], "out_features": ["stage2", "stage3", "stage4"],
        },
        encoder_hidden_dim=32, encoder_in_channels=[48, 64, 64], encoder_ffn_dim=48,
        encoder_attention_heads=2, d_model=32, num_queries=6, decoder_in_channels=[32, 32, 32],
        decoder_ffn_dim=48, decoder_layers=2, decoder_attention_heads=2, num_labels=3,
        eval_size=None, num_denoising=0, decoder_n_points=[3, 6, 3],
    ),
    "dab_detr": architecture(
        "DabDetrForObjectDetection", images(64, 96), **{**_DETR, "hidden_size": 32}
    ),
    "deformable_detr": architecture(
        "DeformableDetrForObjectDetection", images(64, 96),
        **{**_DETR, "backbone_config": _RESNET, "num_feature_levels": 4},
    ),
    "detr": architecture("DetrForObjectDetection", images(64, 96), **_DETR),
    "owlvit": architecture(
        "OwlViTForObjectDetection",
        together(
            images(32),
            tensors(
                input_ids=lambda which: torch.randint(3, 90, (2 + which, 6)),
                attention_mask=lambda which: torch.ones(2 + which, 6, dtype=torch.int64),
            ),
        ),
        vision_config=_VIT, projection_dim=32,
        text_config={
            "vocab_size": 90, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
            "intermediate_size": 48, "max_position_embeddings": 16,
        },
    ),
    "rt_detr": architecture("RTDetrForObjectDetection", images(64), eval_size=None, **_RT_DETR),
    "rt_detr_v2": architecture("RTDetrV2ForObjectDetection", images(64), **_RT_DETR),
    "table_transformer": architecture(
        "TableTransformerForObjectDetection", images(64, 96), **_DETR,
    ),
    "yolos": _vit(
        "YolosForObjectDetection", image_size=[32, 32], num_detection_tokens=4, num_labels=3
    ),
}  # fmt: skip

SEGMENTERS: dict[str, Build] = {
    "beit_segmentation": architecture(
        "BeitForSemanticSegmentation", images(64), **{
            **_VIT, "num_hidden_layers": 4, "out_indices": [1, 2, 3, 4], "num_labels": 3,
            "image_size": 64, "patch_size": 16, "auxiliary_loss_input_dim": 32,
        },
    ),
    "clipseg": architecture(
        "CLIPSegForImageSegmentation", together(images(32), lambda which: {
            "input_ids": torch.randint(3, 90, (2 + which, 6)),
        }),
        vision_config={**_VIT, "num_hidden_layers": 3}, projection_dim=32, extract_layers=[0, 1, 2],
        reduce_dim=16, decoder_num_attention_heads=2, decoder_intermediate_size=24,
        text_config={
            "vocab_size": 90, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
            "intermediate_size": 48, "max_position_embeddings": 16,
        },
    ),
    "eomt": architecture(
        "EomtForUniversalSegmentation", images(32), **_VIT, num_blocks=1, num_queries=4,
        num_upscale_blocks=1, num_labels=3,
    ),
    "mask2former": architecture(
        "Mask2FormerForUniversalSegmentation", images(64), backbone_config=_SWIN, feature_size=32,
        mask_feature_size=32, hidden_dim=32, encoder_feedforward_dim=48, encoder_layers=1,
        decoder_layers=2, num_attention_heads=2, dim_feedforward=48, num_queries=4, num_labels=3,
    ),
    "maskformer": architecture(
        "MaskFormerForInstanceSegmentation", images(64), backbone_config=_SWIN, fpn_feature_size=32,
        mask_feature_size=32, num_labels=3,
        decoder_config={key: value for key, value in {
            **_DETR, "model_type": "detr", "backbone_config": None,
        }.items() if not key.startswith(("backbone", "use_"))},
    ),
    "mobilenet_v2_segmentation": architecture(
        "MobileNetV2ForSemanticSegmentation", images(64, 96), depth_multiplier=0.25, num_labels=3
    ),
    "sam": architecture(
        "SamModel",
        tensors(
            pixel_values=lambda which: torch.randn(1 + which, 3, 64, 64),
            input_points=lambda which: torch.rand(1 + which, 1, 2, 2) * 60,
        ),
        vision_config={
            **_VIT, "image_size": 64, "patch_size": 8, "output_channels": 16, "window_size": 3,
            "global_attn_indexes": [1], "mlp_ratio": 2.0, "num_pos_feats": 8,
        },
        prompt_encoder_config={
            "hidden_size": 16, "image_size": 64, "patch_size": 8, "mask_input_channels": 8,
        },
        mask_decoder_config={
            "hidden_size": 16, "mlp_dim": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
            "iou_head_hidden_dim": 16, "attention_downsample_rate": 2,
        },
    ),
    "segformer": architecture(
        "SegformerForSemanticSegmentation", images(64, 96), hidden_sizes=[8, 16, 24, 32],
        depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 2], decoder_hidden_size=16,
        num_labels=3,
    ),
    "upernet": architecture(
        "UperNetForSemanticSegmentation", images(64, 96), num_labels=3, hidden_size=16,
        backbone_config={
            "model_type": "convnext", "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1],
            "out_features": ["stage1", "stage2", "stage3", "stage4"],
        },
        auxiliary_in_channels=24, auxiliary_channels=16,
    ),
}  # fmt: skip

OTHERS: dict[str, Build] = {
    "depth_anything": architecture(
        "DepthAnythingForDepthEstimation", images(56),
        backbone_config={
            "model_type": "dinov2", **_VIT, "image_size": 56, "patch_size": 14,
            "num_hidden_layers": 4, "reshape_hidden_states": False, "apply_layernorm": True,
            "out_features": ["stage1", "stage2", "stage3", "stage4"],
        },
        reassemble_hidden_size=32, neck_hidden_sizes=[8, 8, 16, 16], fusion_hidden_size=16,
        head_hidden_size=8, patch_size=14,
    ),
    "dpt": architecture(
        "DPTForDepthEstimation", images(32),
        **{**_VIT, "num_hidden_layers": 4}, backbone_out_indices=[0, 1, 2, 3], is_hybrid=False,
        neck_hidden_sizes=[8, 8, 16, 16], fusion_hidden_size=16, num_labels=3,
    ),
    "glpn": architecture(
        "GLPNForDepthEstimation", images(64), hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 2, 2], decoder_hidden_size=16, mlp_ratios=[2, 2, 2, 2],
    ),
    "superpoint": architecture(
        "SuperPointForKeypointDetection", images(64), encoder_hidden_sizes=[8, 8, 16, 16],
        decoder_hidden_size=16, keypoint_decoder_dim=65, descriptor_decoder_dim=16,
        max_keypoints=8, keypoint_threshold=0.0,
    ),
    "swin2sr": architecture(
        "Swin2SRForImageSuperResolution", images(16, 32), image_size=16, patch_size=1, embed_dim=16,
        depths=[1, 1], num_heads=[2, 2], window_size=4, upscale=2,
    ),
    "vitmatte": architecture(
        "VitMatteForImageMatting", images(64, channels=4),
        backbone_config={
            **_vitdet, "num_channels": 4, "patch_size": 16, "out_features": ["stage2"],
            "use_relative_position_embeddings": True, "window_size": 2, "window_block_indices": [0],
        },
        hidden_size=32, convstream_hidden_sizes=[8, 16, 24], fusion_hidden_sizes=[32, 16, 8, 8],
    ),
    "vitpose": architecture(
        "VitPoseForPoseEstimation", images(64), num_labels=4, scale_factor=4,
        backbone_config={
            "model_type": "vitpose_backbone", **_VIT, "image_size": [64, 64],
            "patch_size": [16, 16], "out_features": ["stage2"],
        },
        use_simple_decoder=True,
    ),
    "zoedepth": architecture(
        "ZoeDepthForDepthEstimation", images(64),
        backbone_config={
            "model_type": "beit", **_VIT, "image_size": 64, "patch_size": 16,
            "num_hidden_layers": 4, "reshape_hidden_states": False,
            "out_features": ["stage1", "stage2", "stage3", "stage4"],
        },
        backbone_hidden_size=32, neck_hidden_sizes=[8, 8, 16, 16], fusion_hidden_size=16,
        bottleneck_features=16, num_relative_features=8, bin_embedding_dim=16,
        num_attractors=[4, 2, 2, 1],
        bin_configurations=[{"n_bins": 8, "min_depth": 0.1, "max_depth": 10.0, "name": "indoor"}],
    ),
}  # fmt: skip

VISION: dict[str, Build] = {**CLASSIFIERS, **DETECTORS, **SEGMENTERS, **OTHERS}
