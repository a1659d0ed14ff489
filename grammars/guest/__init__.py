"""The guest engine: C that runs tables over a vocabulary, in a sandbox. One file for each step:

    tables       the tables of a grammar or a regular expression, read
    vocabulary   the tokens as a tree by the classes of their bytes
    sequences    where lexer and parser of each sequence stand
    parser       LR parsing on stacks that share what is below
    spellings    what each token does from a lexer state
    masks        masks: found once, then looked up
    closing      what brings a text to its end
    grammar.c    what the host calls

``grammar.wasm`` is compiled when the package is built.
"""

from importlib.resources import files


def wasm() -> bytes:
    """The compiled guest."""
    return (files(__name__) / "grammar.wasm").read_bytes()
