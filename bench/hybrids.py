"""Tokens of prompts that the prefix cache has, for hybrid models with random weights: pagepool, or vLLM.

    python bench/hybrids.py [--model Qwen3Next,Bamba]
    build/peers/vllm/bin/python bench/hybrids.py --side vllm

Prints one line for each model and trial, with the cached tokens of the requests in turn:

again    one prompt of 1,600 tokens, twice
common   six prompts with 3,000 common tokens and 300 own ones
chat     a conversation that begins with 500 tokens; each turn adds 40 generated ones and 160 others
diverge  a prompt that has the first 1,200 tokens of the conversation
"""

import argparse
import json
import random
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
import transformers

VOCABULARY, NEW_TOKENS = 2048, 40
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MAMBA = {"mamba_d_state": 16, "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_expand": 2, "mamba_n_groups": 1}
MODELS = {
    "Llama": {},
    "Qwen3Next": {
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    },
    "Bamba": {**MAMBA, "attn_layer_indices": [2]},
    "FalconH1": {**MAMBA, "mamba_d_ssm": 512, "head_dim": 64},
}


def config_of(family):
    return getattr(transformers, f"{family}Config")(**{**SIZES, **MODELS[family]})


def trials(ask):
    """Return the cached tokens of each request. `ask(prompt, n)` returns n generated tokens and the cached number."""
    rng = random.Random(0)

    def some(count):
        return [rng.randrange(VOCABULARY) for _ in range(count)]

    found, prompt = {}, some(1600)
    found["again"] = [ask(prompt, 1)[1] for _ in range(2)]
    common = some(3000)
    found["common"] = [ask(common + some(300), 1)[1] for _ in range(6)]
    talk, found["chat"] = some(500), []
    for _ in range(6):
        tokens, cached = ask(talk, NEW_TOKENS)
        found["chat"].append(cached)
        talk = talk + tokens + some(160)
    found["diverge"] = [ask(talk[:1200] + some(300), 1)[1]]
    return found


def pagepool(family):
    from pagepool import Engine, SamplingParams

    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config_of(family)).to(torch.bfloat16).eval()
    with Engine(model, num_blocks=2048) as engine:

        def ask(prompt, count):
            generation = engine.submit(prompt, SamplingParams(count))
            return list(generation.result().token_ids), generation.num_cached

        return trials(ask)


def vllm(family):
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        config = config_of(family)
        config.architectures, config.dtype = [f"{family}ForCausalLM"], "bfloat16"
        Path(folder, "config.json").write_text(json.dumps(config.to_dict()))
        engine = LLM(
            folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="bfloat16",
            enforce_eager=True,
            enable_prefix_caching=True,
            max_model_len=4096,
        )

        def ask(prompt, count):
            params = SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.0, detokenize=False)
            (output,) = engine.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
            return list(output.outputs[0].token_ids), output.num_cached_tokens

        return trials(ask)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--side", choices=("pagepool", "vllm"), default="pagepool")
    parser.add_argument("--model", default=",".join(MODELS), help="default: %(default)s")
    args = parser.parse_args()
    side = {"pagepool": pagepool, "vllm": vllm}[args.side]
    for family in args.model.split(","):
        # vLLM runs one engine in a process, and can end the process
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            try:
                found = pool.submit(side, family).result()
            except Exception as error:
                print(f"{family}: {type(error).__name__}: {str(error)[:200]}", flush=True)
                continue
        for trial, cached in found.items():
            print(f"{family:10} {trial:8} {', '.join(map(str, cached))}", flush=True)


if __name__ == "__main__":
    main()
