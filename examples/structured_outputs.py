"""Outputs that a grammar shapes: a pydantic model with the official OpenAI client, and a pattern with /generate.

python -m sglang.launch_server --model-path MODEL --constrained-json-max-whitespace-cnt 1
python examples/structured_outputs.py [http://127.0.0.1:30000]
"""

import sys
from typing import Annotated, Literal

import httpx
from openai import OpenAI
from pydantic import BaseModel, Field


class City(BaseModel):
    name: Annotated[str, Field(max_length=20)]
    continent: Literal["Africa", "America", "Asia", "Australia", "Europe"]
    inhabitants: Annotated[int, Field(ge=0, le=50_000_000)]


def main(url: str) -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    completion = client.chat.completions.parse(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": "Tell me about the capital of France, as JSON."}],
        response_format=City,
        temperature=0,
        max_tokens=200,
    )
    print(repr(completion.choices[0].message.parsed))

    params = {"regex": r"(19|20)\d\d-(0[1-9]|1[0-2])", "temperature": 0}
    prompt = "The Berlin Wall fell in the month (YYYY-MM)"
    response = httpx.post(f"{url}/generate", json={"text": prompt, "sampling_params": params}, timeout=60)
    print(response.raise_for_status().json()["text"])


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["http://127.0.0.1:30000"]))
