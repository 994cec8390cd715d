"""Write the model of the comparison: `python bench/server_model.py FOLDER [--dtype bfloat16] [--gguf]`.

A Llama with 33 million random weights and the tokenizer of `bench/tiny_llama`. `--gguf` also writes `model.gguf` for
llama.cpp, with the same weights, and needs the package gguf. Greedy decoding never picks a special token or a part of a
character, because their output rows are zero: each new token adds text to a stream.
"""

import argparse
import json
import shutil
from pathlib import Path

TOKENIZER = Path(__file__).resolve().parent / "tiny_llama"
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 10,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
DTYPE_BYTES = {"bfloat16": 2, "float32": 4}


def token_bytes(dtype):
    """Return the bytes of the keys and values of one token."""
    return 2 * SIZES["num_hidden_layers"] * SIZES["num_key_value_heads"] * SIZES["head_dim"] * DTYPE_BYTES[dtype]


def write_model(folder, dtype):
    """Write weights and tokenizer in transformers' format; return the model."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = json.loads((TOKENIZER / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    silent = [token["id"] for token in tokenizer["added_tokens"]]
    silent += [number for token, number in vocabulary.items() if not token.replace("Ġ", "").replace("Ċ", "").isascii()]
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(vocabulary), **SIZES)).to(getattr(torch, dtype))
    with torch.no_grad():
        model.lm_head.weight[silent] = 0
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TOKENIZER / name, folder)
    return model


def interleaved(weight, heads):
    """Reorder the rows of a query or key projection for llama.cpp's rotary embedding."""
    rows, width = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)


def write_gguf(model, folder):
    """Write the same weights as GGUF."""
    import gguf
    import torch

    tokenizer = json.loads((TOKENIZER / "tokenizer.json").read_text())["model"]
    tokens = sorted(tokenizer["vocab"], key=tokenizer["vocab"].get)
    writer = gguf.GGUFWriter(str(Path(folder, "model.gguf")), "llama")
    writer.add_context_length(SIZES["max_position_embeddings"])
    writer.add_embedding_length(SIZES["hidden_size"])
    writer.add_block_count(SIZES["num_hidden_layers"])
    writer.add_feed_forward_length(SIZES["intermediate_size"])
    writer.add_head_count(SIZES["num_attention_heads"])
    writer.add_head_count_kv(SIZES["num_key_value_heads"])
    writer.add_rope_dimension_count(SIZES["head_dim"])
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] + [gguf.TokenType.NORMAL] * (len(tokens) - 1))
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["merges"]])
    for name in ("bos", "eos", "pad"):
        getattr(writer, f"add_{name}_token_id")(0)
    writer.add_add_bos_token(False)
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    heads = {"attn_q": SIZES["num_attention_heads"], "attn_k": SIZES["num_key_value_heads"]}
    weights = {name: tensor.float().numpy() for name, tensor in model.state_dict().items()}

    def add(name, weight):
        if weight.ndim == 1 or model.dtype is torch.float32:  # llama.cpp reads the weights of norms in float32 only
            writer.add_tensor(name, weight.copy())
        else:
            bf16 = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(name, gguf.quantize(weight, bf16), raw_dtype=bf16)

    add("token_embd.weight", weights["model.embed_tokens.weight"])
    add("output_norm.weight", weights["model.norm.weight"])
    add("output.weight", weights["lm_head.weight"])
    for layer in range(SIZES["num_hidden_layers"]):
        for theirs, ours in names.items():
            weight = weights[f"model.layers.{layer}.{theirs}.weight"]
            add(f"blk.{layer}.{ours}.weight", interleaved(weight, heads[ours]) if ours in heads else weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=DTYPE_BYTES, default="bfloat16")
    parser.add_argument("--gguf", action="store_true")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    model = write_model(options.folder, options.dtype)
    if options.gguf:
        write_gguf(model, options.folder)


if __name__ == "__main__":
    main()
