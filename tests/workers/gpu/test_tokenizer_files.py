"""The tokenizer of a model in the form that clients receive."""

from __future__ import annotations

import pytest
from tokenbus.protocol.bodies import Encoding, decode_as
from tokenbus.protocol.errors import RequestError
from tokenbus.protocol.messages import Msg
from tokenbus.workers.gpu.model.loader import load_model, wrap_model
from tokenbus.workers.gpu.serving.streams import Stream
from tokenbus.workers.gpu.serving.tokenizer_files import TokenizerAnswers, tokenizer_files
from transformers import ByT5Tokenizer

from .shapes import tiny_model

TEMPLATE = "{{ messages[0]['content'] }}"


def test_the_answer_is_a_msg_in_the_encoding_of_each_client() -> None:
    loaded = load_model("embedded", device="cpu")
    loaded.tokenizer.chat_template = {"default": TEMPLATE, "tool_use": "{{ tools }}"}
    expected = tokenizer_files(loaded)
    assert expected.chat_template == TEMPLATE
    assert expected.special_tokens["bos_token"] == loaded.tokenizer.bos_token
    answers = TokenizerAnswers()
    encodings: tuple[Encoding, ...] = ("json", "msgpack", "json")
    for number, encoding in enumerate(encodings):
        stream = Stream(1, 2, number, encoding, "embedded", 1)
        _, _, body = answers.frames(stream, loaded)
        assert decode_as(Msg, body) == Msg(stream_id=number, tokenizer=expected)


def test_a_model_without_such_a_tokenizer_is_refused_by_name() -> None:
    model = tiny_model()
    with pytest.raises(RequestError, match="the model tiny has no tokenizer; send its prompts as"):
        tokenizer_files(wrap_model("tiny", model))
    with pytest.raises(RequestError, match="the model tiny has a ByT5Tokenizer, which"):
        tokenizer_files(wrap_model("tiny", model, ByT5Tokenizer()))
