"""Models of transformers at a tiny size and with random weights, called as everyone calls them.

A row names the configuration, the model, the kind of its inputs and what differs from the common tiny sizes; sizes are
set only where a configuration has them, and left alone where a row says None. Nothing is downloaded.
"""

import torch

SMALL = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "attention_hidden_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 4),
    "vocab_size": 96, "num_key_value_heads": 2, "head_dim": 8, "d_kv": 8, "num_experts_per_tok": 2,
    "max_position_embeddings": 64, "n_positions": 64, "n_ctx": 64, "image_size": 32, "patch_size": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip

_SPEECH = {
    "conv_dim": (16, 16, 16), "conv_stride": (5, 2, 2), "conv_kernel": (10, 3, 2), "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
}  # fmt: skip
_STAGES = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}
_WINDOWS = {
    "embed_dim": 8,
    "depths": [1, 1],
    "num_heads": [2, 2],
    "num_attention_heads": None,
    "num_hidden_layers": None,
    "hidden_size": None,
    "window_size": 4,
    "patch_size": 4,
    "image_size": 32,
}
_LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
    "head_dim": 4,
}  # fmt: skip

ROWS = {
    # encoders of text
    "albert": ("Albert", "AlbertModel", "text", {}),
    "bert": ("Bert", "BertForSequenceClassification", "text", {}),
    "bigbird": ("BigBird", "BigBirdModel", "text", {"attention_type": "original_full"}),
    "canine": ("Canine", "CanineModel", "long text", {"num_hash_functions": 2, "num_hash_buckets": 64}),
    "convbert": ("ConvBert", "ConvBertModel", "text", {"head_ratio": 2}),
    "data2vec text": ("Data2VecText", "Data2VecTextModel", "text", {}),
    "deberta": ("Deberta", "DebertaModel", "text", {}),
    "deberta-v2": ("DebertaV2", "DebertaV2Model", "text", {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "distilbert": ("DistilBert", "DistilBertForSequenceClassification", "text", {"hidden_dim": 48}),
    "electra": ("Electra", "ElectraForTokenClassification", "text", {}),
    "ernie": ("Ernie", "ErnieModel", "text", {}),
    "esm": ("Esm", "EsmModel", "text", {"position_embedding_type": "rotary", "mask_token_id": 3}),
    "fnet": ("FNet", "FNetModel", "text", {}),
    "funnel": (
        "Funnel",
        "FunnelModel",
        "text",
        {"block_sizes": [1, 1], "d_head": 8, "d_inner": 48, "num_hidden_layers": None},
    ),
    "ibert": ("IBert", "IBertModel", "text", {}),
    "layoutlm": ("LayoutLM", "LayoutLMModel", "text", {}),
    "longformer": ("Longformer", "LongformerModel", "text", {"attention_window": 8}),
    "megatron-bert": ("MegatronBert", "MegatronBertModel", "text", {}),
    "mobilebert": ("MobileBert", "MobileBertModel", "text", {"intra_bottleneck_size": 32, "embedding_size": 32}),
    "modernbert": ("ModernBert", "ModernBertModel", "text", {"global_attn_every_n_layers": 2, "local_attention": 8}),
    "mpnet": ("MPNet", "MPNetModel", "text", {}),
    "nystromformer": ("Nystromformer", "NystromformerModel", "text", {"segment_means_seq_len": 8, "num_landmarks": 8}),
    "perceiver": (
        "Perceiver",
        "PerceiverModel",
        "embeddings",
        {
            "num_latents": 6,
            "d_latents": 32,
            "d_model": 32,
            "num_blocks": 1,
            "num_self_attends_per_block": 2,
            "num_self_attention_heads": 4,
            "num_cross_attention_heads": 4,
        },
    ),
    "rembert": ("RemBert", "RemBertModel", "text", {"input_embedding_size": 32, "output_embedding_size": 32}),
    "roberta": ("Roberta", "RobertaForMaskedLM", "text", {}),
    "roberta prelayernorm": ("RobertaPreLayerNorm", "RobertaPreLayerNormModel", "text", {}),
    "roformer": ("RoFormer", "RoFormerModel", "text", {}),
    "splinter": ("Splinter", "SplinterModel", "text", {}),
    "squeezebert": ("SqueezeBert", "SqueezeBertModel", "text", {}),
    "xlm": ("XLM", "XLMModel", "text", {"emb_dim": 32}),
    "xlm-roberta": ("XLMRoberta", "XLMRobertaModel", "text", {}),
    "xlnet": ("XLNet", "XLNetModel", "text", {"d_inner": 48, "max_position_embeddings": None}),
    "yoso": ("Yoso", "YosoModel", "text", {"use_expectation": True}),
    # decoders
    "arcee": ("Arcee", "ArceeForCausalLM", "text", {}),
    "bamba": (
        "Bamba",
        "BambaForCausalLM",
        "text",
        {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "attn_layer_indices": [1], "mamba_chunk_size": 4},
    ),
    "biogpt": ("BioGpt", "BioGptForCausalLM", "text", {}),
    "bloom": ("Bloom", "BloomForCausalLM", "text", {}),
    "codegen": ("CodeGen", "CodeGenForCausalLM", "text", {"rotary_dim": 4}),
    "cohere": ("Cohere", "CohereForCausalLM", "text", {}),
    "cohere2": ("Cohere2", "Cohere2ForCausalLM", "text", {}),
    "ctrl": ("CTRL", "CTRLLMHeadModel", "text", {"dff": 48}),
    "deepseek-v2": ("DeepseekV2", "DeepseekV2ForCausalLM", "text", _LATENT),
    "deepseek-v3": ("DeepseekV3", "DeepseekV3ForCausalLM", "text", _LATENT),
    "ernie 4.5": ("Ernie4_5", "Ernie4_5ForCausalLM", "text", {}),
    "exaone 4": ("Exaone4", "Exaone4ForCausalLM", "text", {"sliding_window": 8}),
    "falcon": ("Falcon", "FalconForCausalLM", "text", {"head_dim": None}),
    "falcon-mamba": ("FalconMamba", "FalconMambaForCausalLM", "text", {"state_size": 4}),
    "gemma": ("Gemma", "GemmaForCausalLM", "text", {}),
    "gemma 2": ("Gemma2", "Gemma2ForCausalLM", "text", {"sliding_window": 8}),
    "gemma 3": ("Gemma3Text", "Gemma3ForCausalLM", "text", {"sliding_window": 8}),
    "glm": ("Glm", "GlmForCausalLM", "text", {}),
    "gpt-2": ("GPT2", "GPT2LMHeadModel", "text", {}),
    "gpt-bigcode": ("GPTBigCode", "GPTBigCodeForCausalLM", "text", {}),
    "gpt-j": ("GPTJ", "GPTJForCausalLM", "text", {"rotary_dim": 4}),
    "gpt-neo": (
        "GPTNeo",
        "GPTNeoForCausalLM",
        "text",
        {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    ),
    "gpt-neox": ("GPTNeoX", "GPTNeoXForCausalLM", "text", {}),
    "gpt-oss": ("GptOss", "GptOssForCausalLM", "text", {"sliding_window": 8}),
    "granite": ("Granite", "GraniteForCausalLM", "text", {}),
    "granite moe": ("GraniteMoe", "GraniteMoeForCausalLM", "text", {}),
    "helium": ("Helium", "HeliumForCausalLM", "text", {}),
    "jetmoe": ("JetMoe", "JetMoeForCausalLM", "text", {"kv_channels": 8}),
    "llama": ("Llama", "LlamaForCausalLM", "text", {}),
    "mamba": ("Mamba", "MambaForCausalLM", "text", {"state_size": 4, "time_step_rank": 4}),
    "mamba 2": (
        "Mamba2",
        "Mamba2ForCausalLM",
        "text",
        {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4},
    ),
    "mistral": ("Mistral", "MistralForCausalLM", "text", {"sliding_window": 8}),
    "mixtral": ("Mixtral", "MixtralForCausalLM", "text", {}),
    "mpt": ("Mpt", "MptForCausalLM", "text", {"max_seq_len": 64}),
    "nemotron": ("Nemotron", "NemotronForCausalLM", "text", {}),
    "olmo": ("Olmo", "OlmoForCausalLM", "text", {}),
    "olmo 2": ("Olmo2", "Olmo2ForCausalLM", "text", {}),
    "olmoe": ("Olmoe", "OlmoeForCausalLM", "text", {}),
    "openai-gpt": ("OpenAIGPT", "OpenAIGPTLMHeadModel", "text", {}),
    "opt": ("OPT", "OPTForCausalLM", "text", {"word_embed_proj_dim": 32}),
    "persimmon": ("Persimmon", "PersimmonForCausalLM", "text", {}),
    "phi": ("Phi", "PhiForCausalLM", "text", {}),
    "phi-3": ("Phi3", "Phi3ForCausalLM", "text", {}),
    "phi-moe": ("Phimoe", "PhimoeForCausalLM", "text", {}),
    "qwen 2": ("Qwen2", "Qwen2ForCausalLM", "text", {}),
    "qwen 2 moe": ("Qwen2Moe", "Qwen2MoeForCausalLM", "text", {}),
    "qwen 3": ("Qwen3", "Qwen3ForCausalLM", "text", {}),
    "qwen 3 moe": ("Qwen3Moe", "Qwen3MoeForCausalLM", "text", {}),
    "recurrent gemma": (
        "RecurrentGemma",
        "RecurrentGemmaForCausalLM",
        "text",
        {"lru_width": 32, "attention_window_size": 8},
    ),
    "rwkv": ("Rwkv", "RwkvForCausalLM", "text", {"attention_hidden_size": 32}),
    "smollm 3": ("SmolLM3", "SmolLM3ForCausalLM", "text", {}),
    "stablelm": ("StableLm", "StableLmForCausalLM", "text", {}),
    "starcoder 2": ("Starcoder2", "Starcoder2ForCausalLM", "text", {}),
    "xglm": ("XGLM", "XGLMForCausalLM", "text", {"attention_heads": 4}),
    # encoders with decoders
    "bart": ("Bart", "BartForConditionalGeneration", "both", {}),
    "blenderbot": ("Blenderbot", "BlenderbotForConditionalGeneration", "both", {}),
    "fsmt": ("FSMT", "FSMTModel", "both", {"src_vocab_size": 96, "tgt_vocab_size": 96}),
    "led": ("LED", "LEDModel", "both", {"attention_window": [8, 8], "max_encoder_position_embeddings": 64}),
    "long t5": ("LongT5", "LongT5Model", "both", {"local_radius": 4}),
    "m2m 100": ("M2M100", "M2M100ForConditionalGeneration", "both", {}),
    "marian": ("Marian", "MarianMTModel", "both", {}),
    "mbart": ("MBart", "MBartForConditionalGeneration", "both", {}),
    "mt5": ("MT5", "MT5ForConditionalGeneration", "both", {}),
    "pegasus": ("Pegasus", "PegasusForConditionalGeneration", "both", {}),
    "prophetnet": (
        "ProphetNet",
        "ProphetNetModel",
        "both",
        {"num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4, "num_hidden_layers": None},
    ),
    "switch transformers": ("SwitchTransformers", "SwitchTransformersForConditionalGeneration", "both", {}),
    "t5": ("T5", "T5ForConditionalGeneration", "both", {}),
    "umt5": ("UMT5", "UMT5ForConditionalGeneration", "both", {}),
    "whisper": (
        "Whisper",
        "WhisperForConditionalGeneration",
        "spectrum",
        {"max_source_positions": 16, "num_mel_bins": 16, "max_target_positions": 32},
    ),
    # pictures
    "beit": ("Beit", "BeitModel", "image", {}),
    "bit": (
        "Bit",
        "BitModel",
        "image",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "embedding_size": 8, "num_groups": 4, "layer_type": "bottleneck"},
    ),
    "clip": ("CLIPVision", "CLIPVisionModel", "image", {}),
    "convnext": ("ConvNext", "ConvNextForImageClassification", "image", {**_STAGES, "patch_size": 4}),
    "convnext-v2": ("ConvNextV2", "ConvNextV2ForImageClassification", "image", {**_STAGES, "patch_size": 4}),
    "cvt": (
        "Cvt",
        "CvtModel",
        "image",
        {
            "embed_dim": [8, 16, 32],
            "num_heads": [1, 2, 4],
            "depth": [1, 2, 3],
            "patch_size": None,
            "num_attention_heads": None,
        },
    ),
    "data2vec vision": ("Data2VecVision", "Data2VecVisionModel", "image", {}),
    "deit": ("DeiT", "DeiTForImageClassification", "image", {}),
    "dinov2": ("Dinov2", "Dinov2Model", "image", {}),
    "dpt": (
        "DPT",
        "DPTForDepthEstimation",
        "image",
        {
            "neck_hidden_sizes": [8, 8, 8, 8],
            "fusion_hidden_size": 8,
            "backbone_out_indices": [0, 1, 2, 3],
            "num_hidden_layers": 4,
        },
    ),
    "efficientnet": (
        "EfficientNet",
        "EfficientNetModel",
        "image",
        {"width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320, "depth_divisor": 8},
    ),
    "focalnet": (
        "FocalNet",
        "FocalNetModel",
        "image",
        {
            "embed_dim": 8,
            "depths": [1, 1],
            "focal_levels": [1, 1],
            "focal_windows": [3, 3],
            "hidden_sizes": [8, 16],
            "patch_size": 4,
        },
    ),
    "glpn": (
        "GLPN",
        "GLPNModel",
        "image",
        {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 4, 4]},
    ),
    "hiera": (
        "Hiera",
        "HieraModel",
        "image",
        {
            "embed_dim": 8,
            "depths": [1, 1],
            "num_heads": [1, 2],
            "image_size": [32, 32],
            "patch_size": [7, 7],
            "masked_unit_size": [4, 4],
            "query_stride": [2, 2],
            "num_query_pool": 1,
        },
    ),
    "levit": (
        "Levit",
        "LevitModel",
        "image",
        {
            "image_size": 64,
            "hidden_sizes": [16, 32, 48],
            "num_attention_heads": [2, 2, 2],
            "depths": [1, 1, 1],
            "key_dim": [8, 8, 8],
            "patch_size": 16,
        },
    ),
    "mobilenet-v1": ("MobileNetV1", "MobileNetV1Model", "image", {"depth_multiplier": 0.25}),
    "mobilenet-v2": ("MobileNetV2", "MobileNetV2Model", "image", {"depth_multiplier": 0.25}),
    "mobilevit": (
        "MobileViT",
        "MobileViTModel",
        "image",
        {"hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 8, 16, 16, 16, 32], "patch_size": 2},
    ),
    "mobilevit-v2": (
        "MobileViTV2",
        "MobileViTV2Model",
        "image",
        {"width_multiplier": 0.25, "patch_size": 2, "image_size": 64},
    ),
    "poolformer": (
        "PoolFormer",
        "PoolFormerModel",
        "image",
        {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "patch_size": 16},
    ),
    "pvt": (
        "Pvt",
        "PvtModel",
        "image",
        {
            "hidden_sizes": [8, 16, 24, 32],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 2, 2, 4],
            "patch_sizes": [4, 2, 2, 2],
        },
    ),
    "regnet": (
        "RegNet",
        "RegNetModel",
        "image",
        {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "groups_width": 8, "embedding_size": 8},
    ),
    "resnet": (
        "ResNet",
        "ResNetForImageClassification",
        "image",
        {"hidden_sizes": [16, 32], "depths": [1, 1], "embedding_size": 8},
    ),
    "sam vision": (
        "SamVision",
        "SamVisionModel",
        "image",
        {"output_channels": 8, "global_attn_indexes": [1], "window_size": 2, "mlp_dim": 48, "num_pos_feats": 4},
    ),
    "segformer": (
        "Segformer",
        "SegformerForSemanticSegmentation",
        "image",
        {
            "hidden_sizes": [8, 16, 24, 32],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 2, 2, 4],
            "decoder_hidden_size": 16,
        },
    ),
    "siglip": ("SiglipVision", "SiglipVisionModel", "image", {}),
    "swiftformer": (
        "SwiftFormer",
        "SwiftFormerModel",
        "image",
        {"embed_dims": [8, 16, 24, 32], "depths": [1, 1, 1, 1]},
    ),
    "swin": ("Swin", "SwinForImageClassification", "image", _WINDOWS),
    "swin-v2": ("Swinv2", "Swinv2Model", "image", _WINDOWS),
    "vit": ("ViT", "ViTForImageClassification", "image", {}),
    "vit-mae": ("ViTMAE", "ViTMAEModel", "image", {"decoder_hidden_size": 16}),
    "vit-msn": ("ViTMSN", "ViTMSNModel", "image", {}),
    "vitdet": ("VitDet", "VitDetModel", "image", {"window_block_indices": [0], "window_size": 2}),
    "yolos": ("Yolos", "YolosModel", "image", {"num_detection_tokens": 4, "image_size": [32, 32]}),
    # sound and series
    "audio spectrogram": (
        "AST",
        "ASTModel",
        "patches of sound",
        {"max_length": 32, "num_mel_bins": 16, "patch_size": 8, "frequency_stride": 8, "time_stride": 8},
    ),
    "data2vec audio": ("Data2VecAudio", "Data2VecAudioModel", "sound", {**_SPEECH, "num_conv_pos_embeddings": 2}),
    "hubert": ("Hubert", "HubertModel", "sound", _SPEECH),
    "patch-tst": (
        "PatchTST",
        "PatchTSTModel",
        "series",
        {"num_input_channels": 3, "context_length": 32, "patch_length": 8},
    ),
    "sew": ("SEW", "SEWModel", "sound", {**_SPEECH, "squeeze_factor": 2}),
    "unispeech": ("UniSpeech", "UniSpeechModel", "sound", _SPEECH),
    "wav2vec2": ("Wav2Vec2", "Wav2Vec2ForCTC", "sound", _SPEECH),
    "wavlm": ("WavLM", "WavLMModel", "sound", _SPEECH),
}


def _inputs(kind, batch, config):
    size = getattr(config, "image_size", 32) or 32
    size = size if isinstance(size, int) else size[0]
    ids = torch.randint(3, 96, (batch, 8))
    return {
        "text": lambda: {"input_ids": ids},
        "long text": lambda: {"input_ids": torch.randint(3, 96, (batch, 64))},
        "both": lambda: {"input_ids": ids, "decoder_input_ids": torch.randint(3, 96, (batch, 5))},
        "embeddings": lambda: {"inputs": torch.randn(batch, 10, 32)},
        "image": lambda: {"pixel_values": torch.randn(batch, 3, size, size)},
        "spectrum": lambda: {
            "input_features": torch.randn(batch, 16, 32),
            "decoder_input_ids": torch.randint(3, 96, (batch, 5)),
        },
        "patches of sound": lambda: {"input_values": torch.randn(batch, 32, 16)},
        "sound": lambda: {"input_values": torch.randn(batch, 400)},
        "series": lambda: {"past_values": torch.randn(batch, 32, 3)},
    }[kind]()


def build(name, batch=2):
    """Return a model in eval mode and inputs for it, as keyword arguments."""
    import transformers

    configuration, model, kind, different = ROWS[name]
    made = getattr(transformers, f"{configuration}Config")
    plain = made()
    sizes = {key: value for key, value in SMALL.items() if hasattr(plain, key)}
    config = made(**{key: value for key, value in {**sizes, **different}.items() if value is not None})
    torch.manual_seed(0)
    built = getattr(transformers, model)(config).eval()
    settings = getattr(built, "generation_config", None)
    if settings is not None and settings.decoder_start_token_id is None and settings.bos_token_id is None:
        settings.decoder_start_token_id = SMALL["decoder_start_token_id"]
    return built, _inputs(kind, batch, config)
