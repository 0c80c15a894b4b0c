"""guidellm against a server.

python -m venv /tmp/guidellm && /tmp/guidellm/bin/pip install guidellm
python benchmark/clients/guidellm_client.py --python /tmp/guidellm/bin/python --record
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from common import arguments, report, run_client, server, version

REQUESTS, STREAMS, PROMPT, OUTPUT = 16, 4, 48, 12


def main() -> None:
    args = arguments(__doc__ or "").parse_args()
    output = Path(tempfile.mkdtemp(prefix="guidellm-")) / "report.json"
    lines = []
    with server(args.model_path) as url:
        for endpoint in ("/v1/completions", "/v1/chat/completions"):
            run_client(
                [args.python, "-m", "guidellm", "run",
                 "--backend", f"kind=openai_http,target={url},request_format={endpoint}",
                 "--profile", f"kind=concurrent,streams={STREAMS}",
                 "--constraint", f"kind=max_requests,count={REQUESTS}",
                 "--tokenizer", f"kind=hf_auto,model={args.model_path}",
                 "--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={OUTPUT}",
                 "--output", f"kind=json,path={output}", "--disable-console"]
            )  # fmt: skip
            (benchmark,) = json.loads(output.read_text())["benchmarks"]
            lines.append(f"{endpoint}: {json.dumps(benchmark['metrics']['request_totals'])}")
    report(f"guidellm {version(args.python, 'guidellm')}", lines, args.record)


if __name__ == "__main__":
    main()
