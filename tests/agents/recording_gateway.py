"""A gateway that also appends each rendered prompt to a file, whose path is in the environment
variable ``PROMPTS``."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from tokenbus.clients.gateway.__main__ import main
from tokenbus.clients.gateway.templates.templates import Templates

render = Templates.render


async def recorded(self: Templates, *args: Any, **kwargs: Any) -> str:
    """Renders a prompt, and appends it to the file if the template accepts the messages."""
    text = await render(self, *args, **kwargs)
    with open(os.environ["PROMPTS"], "a") as file:
        file.write(json.dumps(text) + "\n")
    return text


if __name__ == "__main__":
    Templates.render = recorded  # type: ignore[method-assign]
    sys.exit(main())
