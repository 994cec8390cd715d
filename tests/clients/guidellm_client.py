"""guidellm on the command line: every request of a chat and of a completion benchmark succeeds."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

url = sys.argv[1]
TINY = Path(__file__).parents[2] / "bench" / "tiny_llama"

for path in ("/v1/chat/completions", "/v1/completions"):
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [Path(sys.executable).parent / "guidellm", "run", "--disable-console"]
        command += ["--backend", f"kind=openai_http,target={url.removesuffix('/v1')},request_format={path}"]
        command += ["--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6"]
        command += ["--tokenizer", f"kind=huggingface_auto,model={TINY}"]
        command += ["--data", "kind=synthetic_text,prompt_tokens=40,output_tokens=12"]
        command += ["--output", f"kind=json,path={report}"]
        subprocess.run(command, check=True)
        [benchmark] = json.loads(report.read_text())["benchmarks"]
        totals = benchmark["metrics"]["request_totals"]
        assert (totals["successful"], totals["errored"]) == (6, 0), totals
