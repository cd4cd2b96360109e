"""Models of transformers that are made of several configurations, at a tiny size and with random weights.

They take several inputs by name: pictures with points, pictures with text, pictures that text follows from.
"""

import torch

_TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_PICTURES = {**_TOWER, "image_size": 32, "patch_size": 8}


def _picture(size=32):
    return torch.randn(2, 3, size, size)


def sam():
    from transformers import SamConfig, SamMaskDecoderConfig, SamModel, SamPromptEncoderConfig, SamVisionConfig

    vision = SamVisionConfig(
        **{key: value for key, value in _PICTURES.items() if key != "intermediate_size"},
        output_channels=16,
        global_attn_indexes=[1],
        window_size=2,
        mlp_dim=48,
        num_pos_feats=8,
    )
    prompt = SamPromptEncoderConfig(hidden_size=16, image_size=32, patch_size=8, mask_input_channels=4)
    decoder = SamMaskDecoderConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, mlp_dim=24, iou_head_hidden_dim=16,
        attention_downsample_rate=1,
    )  # fmt: skip
    parts = {"vision_config": vision, "prompt_encoder_config": prompt, "mask_decoder_config": decoder}
    config = SamConfig(**{name: part.to_dict() for name, part in parts.items()})
    points = {"input_points": 32 * torch.rand(2, 1, 2, 2), "input_labels": torch.ones(2, 1, 2, dtype=torch.long)}
    return SamModel(config), {"pixel_values": _picture(), **points}


def clip():
    from transformers import CLIPConfig, CLIPModel

    text = {**_TOWER, "vocab_size": 96, "max_position_embeddings": 16, "bos_token_id": 1, "eos_token_id": 2}
    config = CLIPConfig(text_config=text, vision_config=_PICTURES, projection_dim=16)
    return CLIPModel(config), {"input_ids": torch.randint(3, 96, (2, 8)), "pixel_values": _picture()}


def detr():
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    backbone = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], out_features=["stage4"]
    )
    config = DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, backbone_config=backbone, d_model=32,
        encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
        decoder_ffn_dim=48, num_queries=5,
    )  # fmt: skip
    return DetrForObjectDetection(config), {"pixel_values": _picture(64)}


def captions():
    from transformers import GPT2Config, VisionEncoderDecoderConfig, VisionEncoderDecoderModel, ViTConfig

    decoder = GPT2Config(
        n_embd=32, n_layer=1, n_head=4, vocab_size=96, n_positions=32, add_cross_attention=True, bos_token_id=1,
        eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    both = VisionEncoderDecoderConfig.from_encoder_decoder_configs
    config = both(ViTConfig(**_PICTURES), decoder, decoder_start_token_id=1, pad_token_id=0)
    ids = torch.randint(3, 96, (2, 5))
    return VisionEncoderDecoderModel(config), {"pixel_values": _picture(), "decoder_input_ids": ids}


def llava():
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    text = LlamaConfig(**_TOWER, vocab_size=96, num_key_value_heads=2, pad_token_id=0)
    config = LlavaConfig(vision_config=CLIPVisionConfig(**_PICTURES), text_config=text, image_token_id=95)
    ids = torch.randint(3, 90, (2, 24))
    ids[:, 2:18] = 95  # the places of the picture's patches
    inputs = {"input_ids": ids, "pixel_values": _picture(), "attention_mask": torch.ones_like(ids)}
    return LlavaForConditionalGeneration(config), inputs


COMPOSED = {"sam": sam, "clip both": clip, "detr": detr, "vit gpt-2": captions, "llava": llava}


def build(name):
    """Return a model in eval mode and inputs for it, as keyword arguments."""
    torch.manual_seed(0)
    model, inputs = COMPOSED[name]()
    return model.eval(), inputs
