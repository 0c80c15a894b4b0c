"""lm-eval against a server: log-likelihoods as transformers computes them, answers as transformers generates them.

    python -m venv /tmp/lm-eval && /tmp/lm-eval/bin/pip install 'lm-eval[api]' transformers
    python benchmark/clients/lm_eval_client.py --python /tmp/lm-eval/bin/python --model-path BF16_DEMO_MODEL --record

`local-completions` scores multiple-choice answers through `echo` and `logprobs`; `local-chat-completions` generates.
Both engines compute in float32, the tasks are made here from the tests' data, nothing is downloaded. The bf16 demo
model is what `python -m sglang.demo_model --bf16-output DIR` leaves in DIR; the result has the name of that folder, so
give it one that says what it is: SmolLM2-135M-Instruct-bf16.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import ROOT, arguments, report, run_client, server, version
from transformers import AutoModelForCausalLM, AutoTokenizer

DATA = ROOT / "tests" / "fixtures"
NEW_TOKENS = 12
GENERATED = 6
# Float32 sums in another order.
TOLERANCE = 5e-4

TASKS = {
    "local_choice": {
        "dataset_kwargs": {"data_files": {"test": str(DATA / "multiple_choice.jsonl")}},
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}],
    },
    "local_generate": {
        "dataset_kwargs": {"data_files": {"test": str(DATA / "gsm8k_small.jsonl")}},
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n\n\n"], "max_gen_toks": NEW_TOKENS},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def evaluate(python: str, kind: str, task: str, url: str, model: Path, folder: Path, *flags: str) -> list[Any]:
    """The samples that lm-eval logged."""
    given = f"model=served,base_url={url},tokenizer={model},num_concurrent=4"
    output = folder / f"out-{task}"
    run_client(
        [python, "-m", "lm_eval", "--model", kind, "--model_args", given, "--include_path", folder, "--tasks", task,
         "--log_samples", "--output_path", output, *flags]
    )  # fmt: skip
    (path,) = output.rglob("samples_*.jsonl")
    return sorted((json.loads(line) for line in path.read_text().splitlines()), key=lambda sample: sample["doc_id"])


@torch.inference_mode()
def loglikelihoods(model: Any, tokenizer: Any, pairs: list[tuple[str, str]]) -> list[tuple[float, int]]:
    """For each context and continuation what lm-eval's transformers backend counts, and the continuation's tokens."""
    wholes = [tokenizer(context + continuation).input_ids for context, continuation in pairs]
    longest = max(len(ids) for ids in wholes)
    # Padding on the right: no token sees what stands behind it.
    log_probs = torch.log_softmax(model(torch.tensor([ids + [0] * (longest - len(ids)) for ids in wholes])).logits, -1)
    found = []
    for row, ids, (context, _) in zip(log_probs, wholes, pairs, strict=True):
        start = len(tokenizer(context).input_ids)
        target = torch.tensor(ids[start:])
        found.append((float(row[start - 1 : len(ids) - 1].gather(1, target[:, None]).sum()), len(target)))
    return found


@torch.inference_mode()
def chat(model: Any, tokenizer: Any, question: str) -> str:
    messages = [{"role": "user", "content": question}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS)
    return str(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))


def main() -> None:
    args = arguments(__doc__ or "").parse_args()
    folder = Path(tempfile.mkdtemp(prefix="lm-eval-"))
    for name, task in TASKS.items():
        config = {"task": name, "dataset_path": "json", "test_split": "test", "metadata": {"version": 1}, **task}
        (folder / f"{name}.yaml").write_text(json.dumps(config))  # JSON is YAML
    python, model_path = args.python, args.model_path
    with server(model_path, "--served-model-name", "served", "--context-length", "2048") as url:
        scored = evaluate(python, "local-completions", "local_choice", f"{url}/v1/completions", model_path, folder)
        generated = evaluate(
            python, "local-chat-completions", "local_generate", f"{url}/v1/chat/completions", model_path, folder,
            "--apply_chat_template", "--limit", str(GENERATED),
        )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_path)

    requests = [request for sample in scored for request in sample["arguments"].values()]
    got = [float(value) for sample in scored for value, _ in sample["filtered_resps"]]
    wanted = loglikelihoods(model, tokenizer, [(request["arg_0"], request["arg_1"]) for request in requests])
    worst = max(abs(ours - theirs) for ours, (theirs, _) in zip(got, wanted, strict=True))
    assert worst < TOLERANCE, worst
    right = sum(sample["acc"] for sample in scored)
    texts = [(sample["resps"][0][0], chat(model, tokenizer, sample["doc"]["question"])) for sample in generated]
    assert all(got.strip() == wanted.strip() for got, wanted in texts), texts
    report(
        f"lm-eval {version(python, 'lm_eval')}",
        [
            f"model: {model_path.name}, float32",
            f"local-completions: {len(got)} log-likelihoods over {sum(n for _, n in wanted)} tokens, "
            f"acc {right:g} of {len(scored)}; largest difference to transformers {worst:.1e}",
            f"local-chat-completions: {len(texts)} answers, all equal to transformers' greedy ones",
        ],
        args.record,
    )


if __name__ == "__main__":
    main()
