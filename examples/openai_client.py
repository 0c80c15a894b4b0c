"""The official OpenAI client against a running server.

python -m sglang.launch_server --model-path MODEL
python examples/openai_client.py [http://127.0.0.1:30000/v1]
"""

import sys

from openai import OpenAI


def main(base_url: str) -> None:
    client = OpenAI(base_url=base_url, api_key="none")
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    stream = client.chat.completions.create(model=model, messages=messages, max_tokens=64, temperature=0, stream=True)
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:30000/v1")
