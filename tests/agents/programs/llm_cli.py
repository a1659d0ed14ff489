"""Holds a conversation with the Python package of the command line ``llm``."""

import llm


def weather(place: str, days: int) -> str:
    """The weather at a place."""
    return f"sunny for {days} days"


conversation = llm.get_model("gpt-4o").conversation(tools=[weather])
for number in range(5):
    if number == 2:
        for _ in conversation.prompt(f"Question {number}?", stream=True):
            break
        continue
    chain = conversation.chain(f"Question {number}?", system="Be kind.")
    texts = list(chain)
    assert "".join(texts), texts
