"""Holds a conversation with OpenAI's package, over Chat Completions and over Responses."""

import json

import openai

QUESTIONS = [f"Question {number}?" for number in range(5)]
INTERRUPTED = 2
PARAMETERS = {
    "type": "object",
    "properties": {"place": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["place", "days"],
    "additionalProperties": False,
}
client = openai.OpenAI()


def weather(arguments: str) -> str:
    given = json.loads(arguments)
    assert set(given) == {"place", "days"}, given
    return f"sunny for {given['days']} days"


def chat() -> None:
    tool = {"name": "weather", "parameters": PARAMETERS, "strict": True}
    tools = [{"type": "function", "function": tool}]
    messages: list = [{"role": "developer", "content": "Be kind."}]
    for number, question in enumerate(QUESTIONS):
        messages.append({"role": "user", "content": question})
        if number == INTERRUPTED:
            with client.chat.completions.create(
                model="gpt-5", messages=messages, tools=tools, stream=True
            ) as stream:
                next(iter(stream))
            continue
        for step in range(2):
            with client.chat.completions.stream(
                model="gpt-5", messages=messages, tools=tools
            ) as stream:
                list(stream)
                message = stream.get_final_completion().choices[0].message
            messages.append(message)
            for call in message.tool_calls or ():
                content = weather(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
            assert bool(message.tool_calls) == (step == 0), message


def responses() -> None:
    tools = [{"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}]
    items: list = []
    asked = {"model": "gpt-5", "instructions": "Be kind.", "tools": tools, "input": items}
    for number, question in enumerate(QUESTIONS):
        items.append({"role": "user", "content": question})
        if number == INTERRUPTED:
            with client.responses.create(**asked, stream=True) as stream:
                next(iter(stream))
            continue
        for step in range(2):
            with client.responses.stream(**asked) as stream:
                list(stream)
                response = stream.get_final_response()
            items += response.output
            calls = [item for item in response.output if item.type == "function_call"]
            for call in calls:
                output = weather(call.arguments)
                given = {"type": "function_call_output", "call_id": call.call_id, "output": output}
                items.append(given)
            assert bool(calls) == (step == 0), response
            assert calls or response.output_text


chat()
responses()
