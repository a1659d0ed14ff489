"""Small tokenizers of two kinds, trained on a few lines, and the vocabulary of any tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence

from tokenbus.workers.controller.tokens.vocabulary import TokenizerVocabulary
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "The quick brown fox jumps over the lazy dog, 42 times.",
    "def f(x):\n    return {'key': [x + 1, x * 2]}  # naïve café",
    'Größe, 你好, 👩‍👩‍👧 and 🦊: {"a": null}',
] * 4


def vocabulary(
    tokenizer: Tokenizer | str, size: int | None = None, eos: Sequence[int] = ()
) -> TokenizerVocabulary:
    """The vocabulary of a tokenizer for a model with ``size`` tokens; None: as many as the
    tokenizer has."""
    text = tokenizer if isinstance(tokenizer, str) else tokenizer.to_str()
    found = Tokenizer.from_str(text).get_vocab_size() if size is None else size
    return TokenizerVocabulary.from_json(text, size=found, eos=eos, fingerprint="f" * 64)


def byte_level() -> Tokenizer:
    """A byte-level BPE tokenizer like that of GPT-2, which adds a space before a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def unigram(scheme: str = "always") -> Tokenizer:
    """A Unigram tokenizer like that of T5, with byte fallback."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    trainer = trainers.UnigramTrainer(
        vocab_size=120,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        unk_token="<unk>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    content = json.loads(tokenizer.to_str())
    content["model"]["byte_fallback"] = True
    content["added_tokens"] = content["added_tokens"][:3]
    content["decoder"] = {
        "type": "Sequence",
        "decoders": [
            {
                "type": "Metaspace",
                "replacement": "▁",
                "prepend_scheme": scheme,
                "split": True,
            },
            {"type": "ByteFallback"},
        ],
    }
    return Tokenizer.from_str(json.dumps(content))
