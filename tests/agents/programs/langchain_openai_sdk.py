"""Holds a conversation with LangChain's ChatOpenAI, over Responses and over Chat Completions."""

from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def weather(place: str, days: int) -> str:
    """The weather at a place."""
    return f"sunny for {days} days"


def converse(responses: bool) -> None:
    model = ChatOpenAI(model="gpt-5", use_responses_api=responses).bind_tools([weather])
    messages: list = [SystemMessage("Be kind.")]
    for number in range(5):
        messages.append(HumanMessage(f"Question {number}?"))
        if number == 2:
            stream = model.stream(messages)
            next(stream)
            stream.close()
            continue
        for step in range(2):
            answer, *chunks = model.stream(messages)
            for chunk in chunks:
                answer += chunk
            messages.append(answer)
            for call in answer.tool_calls:
                result = weather.invoke(call)
                assert isinstance(result, ToolMessage)
                messages.append(result)
            assert bool(answer.tool_calls) == (step == 0), answer


converse(responses=True)
converse(responses=False)
