"""The check of the text of an uploaded script."""

from __future__ import annotations

import pytest
from tokenbus.protocol.errors import RequestError
from tokenbus.workers.controller.scripts.sources import Source, check_program


@pytest.mark.parametrize(
    "text",
    [
        "async def main(ctx): pass",
        "if True:\n    class Main(Controller): pass",
        "async def run(ctx): pass\nmain = run",
        "import aici\naici.start(run())",
        "from pyaici.server import start as main",
        "from pyaici.server import *",
        "def f(:",
        'x = "\0"',
    ],
)
def test_a_script_that_may_have_a_program_is_accepted(text: str) -> None:
    check_program(Source("python", text.encode()))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x = 'main'",
        "# main",
        "async def run(ctx):\n    '''Like main.'''",
        "x = f'{1}main'",
        "def run(main): pass",
        "print(main)",
    ],
)
def test_a_script_that_only_mentions_a_program_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match=r"does not define async def main\(ctx\)"):
        check_program(Source("python", text.encode()))
