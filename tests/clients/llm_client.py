"""llm on the command line: a chat and a completion, whole and streamed."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

url, text, chat_text = sys.argv[1:]
MODELS = """
- model_id: tiny-chat
  model_name: tiny_llama
  api_base: {url}
- model_id: tiny-text
  model_name: tiny_llama
  api_base: {url}
  completion: true
"""

with tempfile.TemporaryDirectory() as folder:
    Path(folder, "extra-openai-models.yaml").write_text(MODELS.format(url=url))
    environment = {**os.environ, "LLM_USER_PATH": folder}
    options = ["-o", "max_tokens", "24", "-o", "temperature", "0", "--key", "none"]
    for model, expected in (("tiny-chat", chat_text), ("tiny-text", text)):
        for stream in ([], ["--no-stream"]):
            command = [sys.executable, "-m", "llm", "-m", model, *options, *stream, "def main():"]
            found = subprocess.run(command, env=environment, capture_output=True, text=True)
            assert found.stdout == expected + "\n", (found.stdout, found.stderr)
