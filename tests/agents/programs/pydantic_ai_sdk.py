"""Holds a conversation with Pydantic AI, over Chat Completions, Responses and Messages."""

import asyncio

from pydantic_ai import Agent


async def read(context, events) -> None:
    """Reads the events of an answer. With this handler, Pydantic AI streams the answer."""
    async for _ in events:
        pass


async def converse(model: str) -> None:
    agent = Agent(model, instructions="Be kind.")

    @agent.tool_plain
    def weather(place: str, days: int) -> str:
        """The weather at a place."""
        return f"sunny for {days} days"

    history: list = []
    for number in range(5):
        question = f"Question {number}?"
        if number == 2:
            async with agent.run_stream(question, message_history=history) as result:
                async for _ in result.stream_text(delta=True):
                    break
            continue
        result = await agent.run(question, message_history=history, event_stream_handler=read)
        assert result.output
        history = result.all_messages()
        kinds = [part.part_kind for message in history for part in message.parts]
        assert {"thinking", "tool-call", "tool-return", "text"} <= set(kinds), kinds


async def main() -> None:
    for model in ("openai-chat:gpt-5", "openai-responses:gpt-5", "anthropic:claude-opus-4-5"):
        await converse(model)


asyncio.run(main())
