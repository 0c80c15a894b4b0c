"""The engine without a server.

python examples/offline_engine.py MODEL

The guard below matters: the engine starts a scheduler process, which imports this file again.
"""

import sys

import sglang as sgl


def main(model_path: str) -> None:
    with sgl.Engine(model_path=model_path) as engine:
        prompts = ["The capital of France is", "Water boils at"]
        for prompt, output in zip(
            prompts, engine.generate(prompts, {"temperature": 0, "max_new_tokens": 16}), strict=True
        ):
            print(f"{prompt!r} -> {output['text']!r} ({output['meta_info']['completion_tokens']} tokens)")


if __name__ == "__main__":
    main(sys.argv[1])
