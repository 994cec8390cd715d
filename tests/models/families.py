"""Tiny models of many families with random weights, and the tokens that transformers generates with them."""

import functools

import pytest
import torch
import transformers

SIZES = {
    "vocab_size": 997,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
FAMILIES = {
    "Llama": {},
    "Qwen3": {"head_dim": 16},
    "Mistral": {"sliding_window": 32},
    "Gemma2": {"head_dim": 16, "sliding_window": 32, "query_pre_attn_scalar": 16},
    "Gemma3": {
        "head_dim": 16,
        "sliding_window": 32,
        "query_pre_attn_scalar": 16,
        "layer_types": 3 * ["sliding_attention"] + ["full_attention"],
    },
    "GptOss": {"head_dim": 16, "sliding_window": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Cohere2": {
        "head_dim": 16,
        "sliding_window": 32,
        "layer_types": 3 * ["sliding_attention"] + ["full_attention"],
        "logit_scale": 1.0,
    },
    "Bloom": {"n_layer": 3, "n_head": 4},
    "DeepseekV3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
    "Mamba2": {
        "num_hidden_layers": 3,
        "state_size": 16,
        "conv_kernel": 4,
        "expand": 2,
        "head_dim": 16,
        "num_heads": 8,
        "n_groups": 2,
        "chunk_size": 8,
    },
    "Bamba": {**MAMBA, "attn_layer_indices": [2]},
    "Qwen3Next": {
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "Jamba": {
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "use_mamba_kernels": False,
        "num_experts": 2,
        "num_experts_per_tok": 1,
    },
    "FalconH1": {**MAMBA, "mamba_d_ssm": 128, "head_dim": 16},
}
# Families with features that no family above has.
OTHERS = {
    # Layers of two shapes, and layers that attend to keys and values of other layers.
    "Gemma4": {
        "num_hidden_layers": 6,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "sliding_window": 32,
        "vocab_size_per_layer_input": 997,
        "hidden_size_per_layer_input": 16,
        "num_kv_shared_layers": 2,
        "layer_types": 3 * ["sliding_attention", "full_attention"],
    },
    # One attention module shared by several layers.
    "Zamba2": {
        "num_hidden_layers": 6,
        "num_key_value_heads": 4,
        "layers_block_type": 3 * ["mamba", "hybrid"],
        "num_mem_blocks": 1,
        "n_mamba_heads": 8,
        "mamba_headdim": 16,
        "mamba_ngroups": 1,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "chunk_size": 8,
        "use_mamba_kernels": False,
    },
    # Layers that run twice, with separate keys and values for each run.
    "Dory": {"n_input_layers": 1, "n_output_layers": 1, "head_dim": 16, "sliding_window": 32},
    # A convolution without a recurrent state.
    "Lfm2": {"full_attn_idxs": [1], "conv_L_cache": 3},
}
# One family of each kind: full attention, full attention and windows, latents, full attention and recurrent layers.
QUICK = {"Llama", "Gemma3", "DeepseekV3", "Bamba"}
CONFIGS = {"Gemma3": "Gemma3TextConfig", "Gemma4": "Gemma4TextConfig"}
NO_SUCH_SIZE = {
    "Bloom": {
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
    },
    "Mamba2": {"intermediate_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings"},
}
LENGTHS = (5, 17, 9, 70, 33, 130, 16, 1)  # of prompts: shorter and longer than a block and than a window
NEW_TOKENS = 64


def tiny_model(family, **changes):
    """Return a float32 CPU model of a family, the same for each call. Its greedy tokens are not constant."""
    sizes = {name: size for name, size in SIZES.items() if name not in NO_SUCH_SIZE.get(family, ())}
    config = getattr(transformers, CONFIGS.get(family, f"{family}Config"))(
        **{**sizes, **FAMILIES.get(family, {}), **OTHERS.get(family, {}), **changes}
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.data.mul_(4.0)
    model.set_attn_implementation("eager")
    return model


def each(families):
    """Return the families as parameters of a test. `make test` takes a fourth of QUICK: one, another for each test."""
    quick = pytest.mark.one_in(len(QUICK))
    return [pytest.param(family, marks=quick if family in QUICK else pytest.mark.slow) for family in families]


def prompts(lengths=LENGTHS, seed=1):
    """Return lists of random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 900, (length,), generator=generator).tolist() for length in lengths]


def padded(rows):
    """Return the rows padded on the left, and their attention mask: (rows, longest) each."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


@functools.cache
def eager_tokens(family):
    """Return transformers' greedy tokens with eager attention, each prompt alone: a list of ids per prompt."""
    model = tiny_model(family)
    return [
        model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
        )[0, len(prompt) :].tolist()
        for prompt in prompts()
    ]
