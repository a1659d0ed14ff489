"""A model of a gateway, and conversations with this model, for tests without a GPU worker."""

from __future__ import annotations

from typing import Any

from tokenbus.clients.gateway.answer_parts import AnswerForm
from tokenbus.clients.gateway.conversation.constraints import Constraint
from tokenbus.clients.gateway.conversation.planning import Prepared
from tokenbus.clients.gateway.conversation.schemas import Checks
from tokenbus.clients.gateway.models import ServedModel
from tokenbus.clients.gateway.templates import Templates
from tokenbus.protocol.messages import ModelInfo, TokenizerFiles
from tokenizers import Tokenizer
from tokenizers.models import BPE


def small_model(name: str = "m", **files: Any) -> ServedModel:
    """A model with a context of 16 tokens. ``files`` has fields of its ``TokenizerFiles``."""
    info = ModelInfo(name=name, vocab_size=9, context_length=16, eos_token_ids=[0], fingerprint="f")
    return ServedModel(info, TokenizerFiles(fingerprint="f", json="{}", **files), Tokenizer(BPE()))


def prepared(
    form: AnswerForm | None, constraint: Constraint | None = None, name: str = "m"
) -> Prepared:
    """A conversation whose answer has a form and a constraint."""
    return Prepared(small_model(name), [1], form, constraint, Checks(Templates(), form))
