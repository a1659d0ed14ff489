"""Holds a conversation with Anthropic's package and its tool runner."""

import anthropic
from anthropic import beta_tool

client = anthropic.Anthropic()


@beta_tool
def weather(place: str, days: int) -> str:
    """The weather at a place.

    Args:
        place: The place.
        days: The number of days.
    """
    return f"sunny for {days} days"


messages: list = []
for number in range(5):
    messages.append({"role": "user", "content": f"Question {number}?"})
    asked = {
        "model": "claude-opus-4-5",
        "max_tokens": 2000,
        "system": [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}],
        "messages": messages,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    if number == 2:
        with client.messages.stream(**asked, tools=[weather.to_dict()]) as stream:
            next(iter(stream))
        continue
    runner = client.beta.messages.tool_runner(**asked, tools=[weather], stream=True)
    answers = []
    for stream in runner:
        list(stream)
        answers.append(stream.get_final_message())
        messages.append({"role": "assistant", "content": answers[-1].content})
        result = runner.generate_tool_call_response()
        if result is not None:
            messages.append(result)
    reasons = [answer.stop_reason for answer in answers]
    assert reasons == ["tool_use", "end_turn"], answers
