"""Holds a conversation with the Agents SDK, over Responses and over Chat Completions."""

import asyncio

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
)
from openai import AsyncOpenAI


@function_tool
def weather(place: str, days: int) -> str:
    """The weather at a place."""
    return f"sunny for {days} days"


async def converse(model) -> None:
    agent = Agent(name="kind", instructions="Be kind.", model=model, tools=[weather])
    items: list = []
    for number in range(5):
        items.append({"role": "user", "content": f"Question {number}?"})
        result = Runner.run_streamed(agent, items)
        if number == 2:
            async for _ in result.stream_events():
                result.cancel()
            continue
        async for _ in result.stream_events():
            pass
        kinds = [item.type for item in result.new_items]
        assert {"tool_call_item", "tool_call_output_item", "message_output_item"} <= set(kinds)
        items = result.to_input_list()


async def main() -> None:
    client = AsyncOpenAI()
    await converse(OpenAIChatCompletionsModel(model="gpt-5", openai_client=client))
    await converse(OpenAIResponsesModel(model="gpt-5", openai_client=client))


asyncio.run(main())
