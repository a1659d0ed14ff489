"""Gets typed values from a conversation with Instructor, by tools and by a JSON schema, and prints
each value on a line."""

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Weather(BaseModel):
    place: str
    days: int


for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(OpenAI(), mode=mode)
    messages: list = [{"role": "system", "content": "Be kind."}]
    for number in range(5):
        messages.append({"role": "user", "content": f"Question {number}?"})
        asked = {"model": "gpt-5", "messages": messages}
        if number == 2:
            parts = client.chat.completions.create_partial(response_model=Weather, **asked)
            next(iter(parts))
            continue
        if number == 3:
            parts = client.chat.completions.create_partial(response_model=Weather, **asked)
            *_, found = parts
        else:
            found = client.chat.completions.create(response_model=Weather, **asked)
        assert isinstance(found.days, int), found
        print(found.model_dump_json())
        messages.append({"role": "assistant", "content": found.model_dump_json()})
