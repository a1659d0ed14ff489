"""Controllers in Python: trusted code of the operator, as a class or as a script."""

from ....protocol.errors import ControllerError
from ....protocol.sampling import Distribution, Override, Query
from .classes import Controller, PythonProgram
from .context import Context, Label
from .decisions import Decision, append, fork, go_on, look, sample, splice, stop, suspend
from .generated_text import Generated
from .loading import load_program
from .script import ScriptProgram
from .script_constraints import Constraint
from .token_set import TokenSet

__all__ = [
    "Constraint",
    "Context",
    "Controller",
    "ControllerError",
    "Decision",
    "Distribution",
    "Generated",
    "Label",
    "Override",
    "PythonProgram",
    "Query",
    "ScriptProgram",
    "TokenSet",
    "append",
    "fork",
    "go_on",
    "load_program",
    "look",
    "sample",
    "splice",
    "stop",
    "suspend",
]
