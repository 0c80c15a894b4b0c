"""A tool call with the official OpenAI client: streamed, run, and its result given back.

python -m sglang.launch_server --model-path MODEL
python examples/tool_calls.py [http://127.0.0.1:30000/v1] [required|auto]

"auto" needs a model that was trained to call tools; "required" works with any, since a grammar writes the call.
"""

import json
import sys

from openai import OpenAI

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two whole numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "minimum": 0, "maximum": 999},
                "b": {"type": "integer", "minimum": 0, "maximum": 999},
            },
            "required": ["a", "b"],
        },
    },
}


def main(base_url: str, tool_choice: str) -> None:
    client = OpenAI(base_url=base_url, api_key="none")
    model = client.models.list().data[0].id
    messages: list = [{"role": "user", "content": "How much is 17 plus 25?"}]
    options = {"model": model, "temperature": 0, "max_tokens": 100}
    with client.chat.completions.stream(
        **options, messages=messages, tools=[TOOL], tool_choice=tool_choice, parallel_tool_calls=False
    ) as stream:
        for event in stream:
            if event.type == "tool_calls.function.arguments.delta":
                print(event.arguments_delta, end="", flush=True)
        message = stream.get_final_completion().choices[0].message
    print()
    if not message.tool_calls:
        print(message.content)
        return
    (call,) = message.tool_calls
    arguments = json.loads(call.function.arguments)
    result = arguments["a"] + arguments["b"]
    print(f"{call.function.name}({arguments['a']}, {arguments['b']}) = {result}")

    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": str(result)}]
    answer = client.chat.completions.create(**options, messages=messages)
    print(answer.choices[0].message.content)


if __name__ == "__main__":
    main(*(sys.argv[1:] + ["http://127.0.0.1:30000/v1", "required"][len(sys.argv) - 1 :]))
