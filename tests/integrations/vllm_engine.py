"""A vLLM engine in processes of its own, with a tiny random Llama.

As a program, it makes an `LLM` with the options in argv[1], and answers each line of its input: prompts as tokens, and
the number of new tokens.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np

BLOCK = 32
VOCABULARY = 512
ANSWER = "answer: "
CONNECTOR = {
    "kv_connector_module_path": "pagepool.integrations.vllm",
    "kv_role": "kv_both",
}


def random_weights(seed):
    """Return a function that makes large random weights, so that each new token depends on all tokens before it."""
    random = np.random.default_rng(seed)
    return lambda *shape: (random.standard_normal(shape) * 1.5 / shape[-1] ** 0.5).astype(np.float32)


def save(folder, tensors, **config):
    """Write a model in transformers' format."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    common = {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 2048,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps({**common, **config}))


def save_model(folder, seed):
    """Write a Llama of two layers."""
    size, heads, kv_heads, dim, inner = 64, 4, 2, 32, 128
    weight = random_weights(seed)

    tensors = {
        "model.embed_tokens.weight": weight(VOCABULARY, size),
        "lm_head.weight": weight(VOCABULARY, size),
        "model.norm.weight": np.ones(size, np.float32),
    }
    for layer in range(2):
        name = f"model.layers.{layer}."
        shapes = {"q": (heads * dim, size), "k": (kv_heads * dim, size), "v": (kv_heads * dim, size)}
        tensors |= {f"{name}self_attn.{part}_proj.weight": weight(*shape) for part, shape in shapes.items()}
        tensors[f"{name}self_attn.o_proj.weight"] = weight(size, heads * dim)
        tensors |= {f"{name}mlp.{part}_proj.weight": weight(inner, size) for part in ("gate", "up")}
        tensors[f"{name}mlp.down_proj.weight"] = weight(size, inner)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{name}{norm}.weight"] = np.ones(size, np.float32)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": size,
        "intermediate_size": inner,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "torch_dtype": "float32",
    }
    save(folder, tensors, **config)


def save_hybrid_model(folder, seed):
    """Write a Qwen3-Next with three layers of gated delta nets and one of attention. vLLM takes heads of 128 only."""
    size, heads, kv_heads, dim, experts, inner = 64, 4, 2, 128, 2, 64
    weight = random_weights(seed)

    kinds = ["linear_attention"] * 3 + ["full_attention"]
    tensors = {
        "model.embed_tokens.weight": weight(VOCABULARY, size),
        "lm_head.weight": weight(VOCABULARY, size),
        "model.norm.weight": np.zeros(size, np.float32),
    }
    for layer, kind in enumerate(kinds):
        name = f"model.layers.{layer}."
        if kind == "full_attention":
            shapes = {"q_proj": (2 * heads * dim, size), "k_proj": (kv_heads * dim, size)}
            shapes |= {"v_proj": (kv_heads * dim, size), "o_proj": (size, heads * dim)}
            tensors |= {f"{name}self_attn.{part}.weight": weight(*shape) for part, shape in shapes.items()}
            tensors |= {f"{name}self_attn.{part}_norm.weight": np.zeros(dim, np.float32) for part in "qk"}
        else:
            net = f"{name}linear_attn."
            tensors |= {
                f"{net}in_proj_qkvz.weight": weight(4 * dim, size),
                f"{net}in_proj_ba.weight": weight(2, size),
                f"{net}conv1d.weight": weight(3 * dim, 1, 4),
                f"{net}out_proj.weight": weight(size, dim),
                f"{net}norm.weight": np.ones(dim, np.float32),
                f"{net}A_log": np.full(1, -6, np.float32),  # keeps what it has seen for hundreds of tokens
                f"{net}dt_bias": np.zeros(1, np.float32),
            }
        mlps = [*(f"experts.{expert}." for expert in range(experts)), "shared_expert."]
        for mlp in mlps:
            tensors |= {f"{name}mlp.{mlp}{part}_proj.weight": weight(inner, size) for part in ("gate", "up")}
            tensors[f"{name}mlp.{mlp}down_proj.weight"] = weight(size, inner)
        tensors |= {
            f"{name}mlp.gate.weight": weight(experts, size),
            f"{name}mlp.shared_expert_gate.weight": weight(1, size),
        }
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{name}{norm}.weight"] = np.zeros(size, np.float32)
    config = {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "layer_types": kinds,
        "hidden_size": size,
        "intermediate_size": inner,
        "num_hidden_layers": len(kinds),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": dim,
        "linear_value_head_dim": dim,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 1,
        "num_experts": experts,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": inner,
        "shared_expert_intermediate_size": inner,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "dtype": "bfloat16",
    }
    save(folder, tensors, **config)


class VllmEngine:
    """An engine. `tier` has the options of the connector; None: without it.

    By default one process has all of the engine, which starts in half of the time.
    """

    def __init__(self, model, tier, *, has_worker_process=False, connector="PagepoolConnector", **options):
        options = {
            "model": str(model),
            "dtype": "float32",
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "block_size": BLOCK,
            "max_model_len": 2048,
            "kv_cache_memory_bytes": 16 << 20,
            **options,
        }
        if tier is not None:
            options["kv_transfer_config"] = {
                **CONNECTOR,
                "kv_connector": connector,
                "kv_connector_extra_config": tier,
            }
        root = str(Path(__file__).parents[2])
        self.log = Path(os.environ.get("VLLM_TEST_LOG", os.devnull)).open("a")
        self.process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
                "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(has_worker_process)),
            },
        )
        self.lines = []
        try:
            assert self.answer() == "ready"
        except BaseException:
            self.kill()
            raise

    def answer(self):
        """Return the next answer. Keeps the lines of the log before it in `lines`."""
        for line in self.process.stdout:
            self.log.write(line)
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
            self.lines.append(line)
        raise EOFError("the engine has ended:\n" + "".join(self.lines[-40:]))

    def ask(self, prompts, num_tokens=8, **options):
        self.process.stdin.write(json.dumps({"prompts": prompts, "num_tokens": num_tokens, **options}) + "\n")
        self.process.stdin.flush()

    def run(self, prompts, num_tokens=8, **options):
        """Return the new tokens of each prompt, and how many tokens of each were cached."""
        self.ask(prompts, num_tokens, **options)
        answers = self.answer()
        return [tokens for tokens, _ in answers], [cached for _, cached in answers]

    def kill(self):
        """End all processes of the engine at once. May be called again."""
        if self.process.returncode is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._close()

    def stop(self):
        """End the engine as a user does."""
        self.process.stdin.close()
        for line in self.process.stdout:
            self.log.write(line)
            self.lines.append(line)
        code = self.process.wait()
        self._close()
        assert code == 0, "".join(self.lines[-40:])

    def _close(self):
        for file in (self.process.stdin, self.process.stdout, self.log):
            file.close()


def main():
    from vllm import LLM, SamplingParams

    llm = LLM(**json.loads(sys.argv[1]))
    print(f'{ANSWER}"ready"', flush=True)
    for line in sys.stdin:
        call = json.loads(line)
        if call.get("loses_loads"):  # the worker does not find the pages that the scheduler has found
            from pagepool.prefix.page_tier import PageTier

            match = PageTier.match
            PageTier.match = lambda tier, tokens, match=match, **keys: match(tier, tokens[:0], **keys)
        parameters = SamplingParams(
            temperature=0, max_tokens=call["num_tokens"], ignore_eos=True, detokenize=call.get("detokenize", False)
        )
        salts = {"cache_salt": call["cache_salt"]} if "cache_salt" in call else {}
        prompts = [{"prompt_token_ids": tokens, **salts} for tokens in call["prompts"]]
        outputs = llm.generate(prompts, parameters, use_tqdm=False)
        answers = [[list(output.outputs[0].token_ids), output.num_cached_tokens] for output in outputs]
        print(ANSWER + json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
