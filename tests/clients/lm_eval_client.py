"""lm-eval: the served model gets the same answers and scores as the same model in transformers.

There are three small tasks: generate text, choose between two texts by their log probabilities, and the perplexity of
a text.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

url = sys.argv[1]
TINY = Path(__file__).parents[2] / "bench" / "tiny_llama"
DOCUMENTS = [
    {"question": "import os\nimport ", "choices": ["lib\n", "banana\n"], "text": "def read(self):\n    return None\n"},
    {"question": "for i in range(", "choices": ["10):\n", "]]]\n"], "text": "class A(object):\n    pass\n"},
    {"question": "        return self.", "choices": ["_name\n", "+ + +\n"], "text": "if x is None:\n    x = {}\n"},
]
COMMON = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
metadata: {{version: 1}}
"""
TASKS = {
    "tiny_generation": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 20, do_sample: false}
metric_list: [{metric: exact_match}]
""",
    "tiny_choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: 0
doc_to_choice: choices
target_delimiter: ""
metric_list: [{metric: acc}]
""",
    "tiny_perplexity": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}]
""",
}


def evaluate(folder: Path, name: str, model: str, arguments: str) -> dict[str, list]:
    """Run lm-eval with a model; returns its answers to the documents of each task."""
    output = folder / name
    command = [sys.executable, "-m", "lm_eval", "run", "--model", model, "--model_args", arguments, "--log_samples"]
    command += ["--tasks", *TASKS, "--include_path", str(folder), "--output_path", str(output)]
    command += ["--batch_size", "1", "--device", "cpu"]
    subprocess.run(command, check=True, env={**os.environ, "HF_HOME": str(folder / "cache")})
    found = {}
    for task in TASKS:
        [samples] = output.rglob(f"samples_{task}_*.jsonl")
        lines = [json.loads(line) for line in samples.read_text().splitlines()]
        found[task] = [line["filtered_resps"] for line in sorted(lines, key=lambda line: line["doc_id"])]
        assert len(found[task]) == len(DOCUMENTS), found
    return found


def numbers(answers: list) -> list[float]:
    """Flatten pairs of a log probability and a flag (true if it belongs to the most likely token)."""
    flat = []
    for answer in answers:
        flat += numbers(answer) if isinstance(answer, list) else [float({"True": 1, "False": 0}.get(answer, answer))]
    return flat


with tempfile.TemporaryDirectory() as place:
    folder = Path(place)
    data = folder / "documents.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    for task, text in TASKS.items():
        (folder / f"{task}.yaml").write_text(f"task: {task}{COMMON.format(data=data)}{text}")
    served = f"model=tiny_llama,base_url={url}/completions,tokenizer={TINY},num_concurrent=2,max_length=1024"
    ours = evaluate(folder, "served", "local-completions", served)
    theirs = evaluate(folder, "transformers", "hf", f"pretrained={TINY},dtype=float32,max_length=1024")

assert ours["tiny_generation"] == theirs["tiny_generation"], (ours, theirs)
for task in ("tiny_choice", "tiny_perplexity"):
    for one, other in zip(numbers(ours[task]), numbers(theirs[task]), strict=True):
        assert abs(one - other) <= 1e-4 * max(1, abs(other)), (task, ours, theirs)
