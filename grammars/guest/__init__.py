"""The guest engine: C code that runs in the sandbox, and computes masks of a vocabulary from
tables. Its files:

    tables       reading the tables of a grammar or a regular expression
    vocabulary   the tokens as a tree by the classes of their bytes
    sequences    the state of lexer and parser of each sequence
    parser       LR parsing on stacks that share their lower parts
    spellings    the terminals that each token completes, for each lexer state
    masks        token masks: computed once, then cached
    closing      completing a text
    grammar.c    the exports that the host calls

``grammar.wasm`` is compiled when the package is built.
"""

from importlib.resources import files


def wasm() -> bytes:
    """The compiled guest; raises FileNotFoundError if it is not compiled."""
    file = files(__name__) / "grammar.wasm"
    if not file.is_file():
        raise FileNotFoundError(f"{file} is not compiled; run make install in the checkout")
    return file.read_bytes()
