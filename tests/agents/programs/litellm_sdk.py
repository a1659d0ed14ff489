"""Holds a conversation with LiteLLM, in OpenAI's and in Anthropic's form."""

import litellm

PARAMETERS = {
    "type": "object",
    "properties": {"place": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["place", "days"],
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]


def converse(model: str) -> None:
    messages: list = [{"role": "system", "content": "Be kind."}]
    for number in range(5):
        messages.append({"role": "user", "content": f"Question {number}?"})
        if number == 2:
            stream = litellm.completion(model=model, messages=messages, tools=TOOLS, stream=True)
            next(iter(stream))
            continue
        for step in range(2):
            chunks = list(
                litellm.completion(model=model, messages=messages, tools=TOOLS, stream=True)
            )
            message = litellm.stream_chunk_builder(chunks, messages).choices[0].message
            messages.append(message.model_dump())
            for call in message.tool_calls or ():
                content = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
                messages.append(content)
            assert bool(message.tool_calls) == (step == 0), message


converse("openai/gpt-5-local")
converse("anthropic/claude-opus-4-5")
