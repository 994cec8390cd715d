"""Train the tiny Llama of this folder: a byte-level BPE tokenizer and a model on the standard library's sources.

    python bench/tiny_llama/train.py

Writes config.json, generation_config.json, tokenizer.json, tokenizer_config.json, chat_template.jinja and
model.safetensors (float16, below 4 MB in all), which `AutoModelForCausalLM` and `AutoTokenizer` of transformers load.
Needs torch, transformers and tokenizers. The same sources, seed, versions and number of threads give the same weights.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

FOLDER = Path(__file__).parent
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings"}
END = "<|endoftext|>"  # between files
VOCABULARY = 1536
LENGTH = 256  # tokens per training row
MAX_LENGTH = 1024  # what the positions of the model reach
LIMIT = 4_000_000  # bytes of the folder's generated files
# A conversation as comments: what follows the last one is code.
CHAT_TEMPLATE = (
    "{% for message in messages %}# {{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant:\n{% endif %}"
)


def sources() -> list[str]:
    """Return the sources of the standard library's modules, without tests, sorted by name."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path for path in root.rglob("*.py") if not SKIPPED & set(path.relative_to(root).parts))
    return [path.read_text(encoding="utf-8") for path in paths]


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE with `VOCABULARY` tokens: it encodes every text, and decoding restores every byte."""
    tokenizer = Tokenizer(models.BPE())
    # Numbers are split into digits. The spaces of an indentation stay together.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def new_model() -> LlamaForCausalLM:
    """Return a Llama with 1.9 million parameters and tied embeddings."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=MAX_LENGTH,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
        )
    )


def train(model: LlamaForCausalLM, data: torch.Tensor, steps: int, rows: int) -> None:
    """Train on random windows of the sources with AdamW and one learning rate cycle."""
    groups = [
        {"params": [parameter for parameter in model.parameters() if parameter.ndim == 2], "weight_decay": 0.1},
        {"params": [parameter for parameter in model.parameters() if parameter.ndim != 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=5e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, steps))
    began, mean = time.monotonic(), None
    for step in range(1, steps + 1):
        starts = torch.randint(len(data) - LENGTH, (rows,)).tolist()
        batch = torch.stack([data[start : start + LENGTH] for start in starts])
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        mean = loss.item() if mean is None else 0.95 * mean + 0.05 * loss.item()
        if step % 25 == 0 or step == steps:
            print(f"step {step} of {steps}, loss {mean:.3f}, {time.monotonic() - began:.0f} s", flush=True)


def rate(step: int, steps: int) -> float:
    """Return the learning rate factor: linear warm-up over 40 steps, then linear decay."""
    return min((step + 1) / 40, (steps - step) / steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=1600, help="training steps; default: 1600")
    parser.add_argument("--rows", type=int, default=6, help=f"rows of {LENGTH} tokens per step; default: 6")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch; default: 1")
    parser.add_argument("--output", type=Path, default=FOLDER, help="output folder; default: this folder")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    texts = sources()
    tokenizer = train_tokenizer(texts)
    ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    data = torch.tensor([token for tokens in ids for token in (tokenizer.eos_token_id, *tokens)])
    print(f"{len(texts)} files, {len(data):,} tokens", flush=True)
    model = new_model()
    train(model, data, options.steps, options.rows)
    model.half().save_pretrained(options.output)
    tokenizer.save_pretrained(options.output)
    size = sum(path.stat().st_size for path in options.output.iterdir() if path.suffix != ".py")
    if size > LIMIT:
        raise SystemExit(f"the files have {size:,} bytes, more than {LIMIT:,}")
    print(f"{size:,} bytes in {options.output}")


if __name__ == "__main__":
    main()
