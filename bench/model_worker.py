"""Worker process of models.py for one side: python model_worker.py '{"side": ..., "folder": ..., "dtype": ...}'

    {"workload": [sequences, shared, own, new], "round": null}
    ->  {}
    {"workload": [sequences, shared, own, new], "round": number}
    ->  {"first": seconds, "all": seconds, "step": seconds, "cpu": seconds, "bytes": n, "tokens": [[...]], "turns": n}

Without a number, the round is a warm-up. `step` is the median time of a decode step, and `cpu` the CPU time of the
process in it: with one thread, it depends much less on other load. `turns` is measured for prompts with a shared
prefix, sent one after another. It is the time to the first token of later requests, relative to the first request.
`--make MODEL FOLDER DTYPE` writes a model with random weights.
"""

import json
import os
import random
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np

sys.path[0] = str(Path(__file__).resolve().parent)
VOCABULARY, SEED = 32_000, 0
LONGEST = 8192  # maximum tokens of a sequence
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": LONGEST,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
LARGE = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 28}
MORE = {
    "llama": ("Llama", {}),
    "llama-1.4b": ("Llama", {**LARGE, "num_attention_heads": 32, "num_key_value_heads": 8}),
    "mistral": ("Mistral", {"sliding_window": 1024}),
    "gemma3": ("Gemma3Text", {"head_dim": 64, "sliding_window": 512, "query_pre_attn_scalar": 64}),
    "bamba": ("Bamba", {"attn_layer_indices": [3, 7, 11], "mamba_n_heads": 24, "mamba_d_head": 64}),
}


def make(model, folder, dtype):
    """Write a model with random weights."""
    import torch
    import transformers

    name, more = MORE[model]
    torch.manual_seed(SEED)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **more})
    kind = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")
    kind(config).to(getattr(torch, dtype)).save_pretrained(folder)


class Transformers:
    """`generate` of transformers, with its own cache. All prompts have the same length, so none is padded."""

    def __init__(self, folder, dtype, threads):
        import torch
        import transformers

        torch.set_num_threads(threads)
        transformers.logging.set_verbosity_error()
        self.torch = torch
        self.stamps = []  # time and CPU time at which each forward began
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        self.model.register_forward_pre_hook(lambda *arguments: self.stamps.append(stamp()))

    def tokens(self, prompts, new):
        ids = self.torch.tensor(prompts)
        mask = self.torch.ones_like(ids)
        with self.torch.inference_mode():
            out = self.model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False)
        return out[:, ids.shape[1] :].tolist()


class GenerateBatch(Transformers):
    """`generate_batch` of transformers: its continuous batching over its own pages."""

    def tokens(self, prompts, new):
        from transformers import GenerationConfig
        from transformers.generation import ContinuousBatchingConfig

        blocks = sum(-(-(len(prompt) + new) // 16) + 1 for prompt in prompts)
        out = self.model.generate_batch(
            prompts,
            generation_config=GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=ContinuousBatchingConfig(page_size=16, num_blocks=blocks),
            progress_bar=False,
        )
        found = {tuple(one.prompt_ids): list(one.generated_tokens) for one in out.values()}
        return [found[tuple(prompt)] for prompt in prompts]


class Pagepool(Transformers):
    """Our engine over the same model."""

    def __init__(self, folder, dtype, threads):
        super().__init__(folder, dtype, threads)
        from pagepool import SchedulerConfig
        from pagepool.engine import Engine

        config = SchedulerConfig(max_batch_sequences=32, max_batch_tokens=2048, max_prefill_tokens=2048)
        self.engine = Engine(self.model, pool_bytes=4 << 30, config=config)
        # vLLM writes zeros to its whole cache when it starts. Without this, rounds would measure the system's first
        # access to memory, which takes 0.1 to 3 us for a token of a layer.
        np.asarray(self.engine.runner.pool)[:] = 0

    def tokens(self, prompts, new):
        from pagepool.engine import SamplingParams

        running = [self.engine.submit(prompt, SamplingParams(new)) for prompt in prompts]
        return [one.result().token_ids for one in running]


class Vllm:
    """vLLM's CPU engine, eager."""

    is_eager = True

    def __init__(self, folder, dtype, threads):
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{threads - 1}")
        # The memory of this process is measured, so the engine must run in it.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        from vllm import LLM, SamplingParams

        self.params = SamplingParams
        self.llm = LLM(
            model=folder,
            dtype=dtype,
            enforce_eager=self.is_eager,
            skip_tokenizer_init=True,
            max_model_len=LONGEST,
            seed=SEED,
        )
        self.stamps = []  # time and CPU time at which each step began
        step = self.llm.llm_engine.step

        def stamped():
            self.stamps.append(stamp())
            return step()

        self.llm.llm_engine.step = stamped

    def tokens(self, prompts, new):
        params = self.params(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        out = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in out]


class CompiledVllm(Vllm):
    """vLLM's CPU engine with its default settings: compiled by torch."""

    is_eager = False


SIDES = {
    "pagepool": Pagepool,
    "generate": Transformers,
    "generate_batch": GenerateBatch,
    "vllm": Vllm,
    "vllm-compiled": CompiledVllm,
}


def prompts_of(sequences, shared, own, draw):
    """Return random prompts. Each seed gives different ones, so that no cache holds them."""
    numbers = random.Random(draw)
    beginning = [numbers.randrange(3, VOCABULARY) for _ in range(shared)]
    return [[*beginning, *(numbers.randrange(3, VOCABULARY) for _ in range(own))] for _ in range(sequences)]


def stamp():
    """Return the time and the CPU time of this process, in seconds."""
    return time.perf_counter(), time.process_time()


def timed(side, prompts, new):
    began = time.perf_counter()
    tokens = side.tokens(prompts, new)
    return time.perf_counter() - began, tokens


def peak_bytes():
    """Return the peak resident memory of the process since `forget_peak`, in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def forget_peak():
    Path("/proc/self/clear_refs").write_text("5")


def measure(side, number, sequences, shared, own, new):
    if number is None:  # warm-up: the first calls of a shape allocate and compile
        side.tokens(prompts_of(sequences, shared, own, SEED + 1_000_000), 3)
        return {}
    seed = SEED + 3 * number
    forget_peak()
    first, _ = timed(side, prompts_of(sequences, shared, own, seed), 1)
    side.stamps.clear()
    every, tokens = timed(side, prompts_of(sequences, shared, own, seed + 1), new)
    stamps = side.stamps[-(new // 2) - 1 :]
    steps, cpu = (list(map(float.__sub__, column[1:], column)) for column in zip(*stamps, strict=True))
    found = {
        "first": first,
        "all": every,
        "step": median(steps),
        "cpu": median(cpu),
        "bytes": peak_bytes(),
        "tokens": tokens,
        "turns": None,
    }
    if shared:
        times = [timed(side, [prompt], 1)[0] for prompt in prompts_of(sequences, shared, own, seed + 2)]
        found["turns"] = median(times[1:]) / times[0]
    return found


def main(about):
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not mix with the answers
    side = None
    for line in sys.stdin:
        try:
            if side is None:
                side = SIDES[about["side"]](about["folder"], about["dtype"], about["threads"])
            asked = json.loads(line)
            answer = measure(side, asked["round"], *asked["workload"])
        except Exception as error:
            sentence = " ".join(str(error).split())
            answer = {"failed": f"{type(error).__name__}: {sentence[:300]}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--make":
        make(*sys.argv[2:])
    else:
        main(json.loads(sys.argv[1]))
