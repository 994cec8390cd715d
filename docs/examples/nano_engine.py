"""An engine for Llama models on a CPU, in the form of nano-vllm. Memory, attention and scheduler are pagepool's.

    python nano_engine.py FOLDER [FILE.gguf]

FOLDER is a folder of transformers; with a second argument, of a GGUF file. Copy what you need.
"""

import sys
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import embedding, linear, rms_norm, silu

import pagepool
from pagepool import BlockTables, KvCachePool, KvLayout, PrefixCache, Scheduler, SchedulerConfig


@dataclass
class SamplingParams:
    temperature: float = 0.0
    max_tokens: int = 64
    ignore_eos: bool = False


class Llama:
    """The forward pass of a Llama over the tokens of a step."""

    def __init__(self, model, num_blocks):
        about = model.config
        self.weights = {name.removeprefix("model."): weight.detach() for name, weight in model.named_parameters()}
        self.weights.setdefault("lm_head.weight", self.weights["embed_tokens.weight"])
        self.num_layers, self.eps = about.num_hidden_layers, about.rms_norm_eps
        self.dim = getattr(about, "head_dim", None) or about.hidden_size // about.num_attention_heads
        self.inverse = model.model.rotary_emb.inv_freq.float()
        dtype = str(model.dtype).removeprefix("torch.")
        layout = KvLayout(self.num_layers, about.num_key_value_heads, self.dim, dtype=dtype)
        self.pool = KvCachePool.from_layout(layout, num_blocks)

    def rotate(self, x, cos, sin):
        """Apply the rotary embedding to x of shape (tokens, heads, dim)."""
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def layer(self, number, x, tables, cos, sin):
        """Return x of shape (tokens, width) after a layer. Appends the tokens' keys and values to the pages."""

        def times(name, x):
            return linear(x, self.weights[f"layers.{number}.{name}_proj.weight"])

        def norm(name, x):
            return rms_norm(x, x.shape[-1:], self.weights[f"layers.{number}.{name}_layernorm.weight"], self.eps)

        y = norm("input", x)
        q, k, v = (times(f"self_attn.{name}", y).unflatten(-1, (-1, self.dim)) for name in "qkv")
        self.pool.append(number, tables.slot_mapping, self.rotate(k, cos, sin), v)
        attended = pagepool.decode(self.rotate(q, cos, sin), self.pool, number, tables)
        x = x + times("self_attn.o", torch.as_tensor(attended).flatten(1))
        y = norm("post_attention", x)
        return x + times("mlp.down", silu(times("mlp.gate", y)) * times("mlp.up", y))

    def logits(self, tokens, tables):
        """Return the logits after the last token of each sequence of the step."""
        starts, lengths = tables.query_start_loc, tables.seq_lens
        counts = np.diff(starts)
        positions = np.concatenate([np.arange(end - n, end) for end, n in zip(lengths, counts, strict=True)])
        angles = torch.from_numpy(positions).float()[:, None, None] * self.inverse
        x = embedding(torch.from_numpy(tokens), self.weights["embed_tokens.weight"])
        for number in range(self.num_layers):
            x = self.layer(number, x, tables, angles.cos(), angles.sin())
        x = rms_norm(x[starts[1:] - 1], x.shape[-1:], self.weights["norm.weight"], self.eps)
        return linear(x, self.weights["lm_head.weight"])


class LLM:
    """Generates the texts of many prompts together."""

    def __init__(self, model, tokenizer, num_blocks=512, max_num_seqs=16, max_model_len=2048):
        self.tokenizer, self.llama = tokenizer, Llama(model, num_blocks)
        self.ends = {tokenizer.eos_token_id}
        pool = self.llama.pool
        config = SchedulerConfig(max_sequences=max_num_seqs, max_batch_sequences=max_num_seqs)
        self.cache = PrefixCache(pool.allocator)
        self.scheduler = Scheduler(config, pool, self.cache)
        self.tables = BlockTables(max_num_seqs, -(-max_model_len // pool.block_size))
        self.random = np.random.default_rng(0)

    def generate(self, prompts, params):
        """Return a dict with `text` and `token_ids` for each prompt, in their order."""
        waiting = {}
        for prompt in prompts:
            ids = self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
            ends = () if params.ignore_eos else self.ends
            waiting[self.scheduler.add_request(ids, max_new_tokens=params.max_tokens, stop_token_ids=ends)] = None
        while None in waiting.values():
            self.step(params.temperature)
            waiting |= {one.id: one.output_tokens for one in self.scheduler.drain_finished() if one.id in waiting}
        return [
            {"text": self.tokenizer.decode(ids, skip_special_tokens=True), "token_ids": ids} for ids in waiting.values()
        ]

    @torch.inference_mode()
    def step(self, temperature):
        """Compute one batch: chunks of prompts, and a token for each running sequence."""
        batch = self.scheduler.schedule()
        if batch.is_empty:
            return
        try:
            self.tables.fill(batch)
            logits = self.llama.logits(np.concatenate(batch.tokens), self.tables).float().numpy()
            tokens = [self.sample(row, temperature) for row in logits]
        except BaseException:
            self.scheduler.give_up(batch)  # the pages that it wrote are not cached
            raise
        self.scheduler.commit(batch, tokens)

    def sample(self, row, temperature):
        if temperature == 0:
            return int(row.argmax())
        return int((row / temperature + self.random.gumbel(size=row.shape)).argmax())


def main(folder, file=None):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {} if file is None else {"gguf_file": file}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **where)
    llm = LLM(model, AutoTokenizer.from_pretrained(folder, **where))
    prompts = ["The capital of France is", "Water boils at", "def main():"]
    for prompt, output in zip(prompts, llm.generate(prompts, SamplingParams(max_tokens=24)), strict=True):
        print(f"{prompt!r}: {output['text']!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
