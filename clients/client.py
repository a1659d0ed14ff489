"""``Client``: the blocking client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

from ..protocol.errors import TokenbusError
from ..protocol.keys import OwnKey
from ..protocol.messages import Embedded, ModelInfo, Msg, Status, StoredModule, TokenizerFiles
from .base_client import BaseClient, ClientOptions
from .calls import Call
from .chats import BlockingChats, Chat, Messages, Tools
from .lanes import hand_out
from .recording import Recorder
from .request_options import (
    ASK_S,
    UPLOAD_S,
    EmbedOptions,
    GenerateOptions,
    Prompt,
    ScoreOptions,
    buffer_call,
    delete_call,
    embed_call,
    generate_call,
    model_info_call,
    score_call,
    status_call,
    stored_module,
    stored_modules,
    tag_call,
    tags_call,
    tokenizer_call,
    upload_call,
)
from .results import GeneratedSequence, Scores
from .streams import Stream


class Client(BaseClient):
    """A connection to a Tokenbus broker, for any number of streams from any number of threads.

    ``front`` is the broker's address. If it is None, the setting ``front`` applies
    (``TOKENBUS_FRONT`` or ``tokenbus.toml``; default: ``tcp://127.0.0.1:5555``). ``front`` may be
    several addresses of brokers, separated by commas. The client connects to one of these brokers.
    If it fails, the client connects to the next one.

    ``patience_s``: if the broker does not answer for this number of seconds, calls fail. The
    default is the setting ``session_timeout_s``, or ``keep_s`` if ``keep_s`` is longer. ``key``:
    the client's key, as ``OwnKey.read`` returns it. If it is None, the client uses the key file of
    the setting ``key``. Without this setting, it uses this machine's key file, if there is one.
    ``keep_s``: if the connection is lost, the broker continues this client's streams for at least
    this number of seconds. Raises KeyFault if the key cannot be read, and AddressError if ``front``
    is not a valid address.

        with Client() as client:
            for token in client.generate("def add(a, b):", max_tokens=20):
                print(token.text, end="")
    """

    def __init__(
        self,
        front: str | None = None,
        *,
        patience_s: float | None = None,
        key: OwnKey | None = None,
        keep_s: float = 0.0,
    ) -> None:
        super().__init__(ClientOptions(front, patience_s, key, keep_s), hand_out)
        self._chats: BlockingChats | None = None

    def generate(
        self,
        prompt: Prompt,
        *,
        record: str | Path | Recorder | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Stream:
        """Begins a stream of tokens that continue ``prompt``, which is text or token ids.

        The options are those of ``GenerateOptions``, such as ``model``, ``seed``, ``stop``, ``n``,
        ``temperature`` (default 0, which is greedy) and ``max_tokens`` (default 64).

        Raises TypeError if an option is unknown, and RequestError if the client itself detects that
        an option is not valid. Other errors are raised when the stream is read: RequestError (the
        broker or the worker refuses the request), UnavailableError, RequestTimeoutError,
        ControllerError, SlowClientError, ServiceError.

        ``record``: when the stream has ended or is closed, it is written to this file. ``tokenbus
        replay`` reads the file.
        """
        call = generate_call(prompt, options)
        if record is None:
            return Stream(self, self._connection, call, options.get("on_system"))
        recorder = record if isinstance(record, Recorder) else Recorder(record)
        model = None
        with suppress(TokenbusError):
            model = self.model_info(options.get("model", ""))
        recorder.begin(call, model, self._sent_buffers)
        return Stream(self, self._connection, call, options.get("on_system"), recorder)

    def chat(
        self,
        messages: Messages,
        *,
        tools: Tools | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Chat:
        """Begins the answer to a conversation. ``messages`` and ``tools`` have OpenAI's form.

        The options are those of ``generate``. By default, ``max_tokens`` allows as many tokens as
        fit into the context. ``tool_choice``: ``none``, ``auto``, ``required``, or a function in
        OpenAI's form. Needs the extra ``gateway``. Raises RequestError if the conversation is not
        valid.
        """
        if self._chats is None:
            self._chats = BlockingChats(self)
        prepared = self._chats.prepare(messages, tools, tool_choice, options)
        return Chat(self.generate(prepared.ids, **options), prepared)

    def score(self, prompt: Prompt, scored: Prompt, **options: Unpack[ScoreOptions]) -> Scores:
        """The log-probability of each token of ``scored``, given all tokens before it."""
        call = score_call(prompt, scored, options)
        stream = Stream(self, self._connection, call, options.get("on_system"))
        [sequence] = stream.wait() or [GeneratedSequence(0)]
        return Scores.of(sequence)

    def embed(self, inputs: Sequence[Sequence[int]], **options: Unpack[EmbedOptions]) -> Embedded:
        """One vector for each input. An input is a list of token ids (see ``tokenizer``). At most
        256 inputs are allowed.

        Raises RequestError if the model does not compute embeddings.
        """
        answer = self.ask(embed_call(inputs, options))
        assert isinstance(answer.embedded, Embedded)
        return answer.embedded

    def models(self, *, timeout_s: float = ASK_S) -> list[str]:
        """The names of the loaded models, sorted."""
        status = self.status(timeout_s=timeout_s)
        return sorted({name for worker in status.workers for name in worker.models})

    def model_info(self, model: str = "", *, timeout_s: float = ASK_S) -> ModelInfo:
        """The properties of a model. A model that is served on demand is loaded first."""
        answer = self.ask(model_info_call(model, timeout_s))
        assert isinstance(answer.model_info, ModelInfo)
        return answer.model_info

    def tokenizer(self, model: str = "", *, timeout_s: float = ASK_S) -> TokenizerFiles:
        """The files of a model's tokenizer, with the chat template and the special tokens. They can
        have up to about 20 MB.

        Raises RequestError if the tokenizers library cannot read the model's tokenizer.
        """
        answer = self.ask(tokenizer_call(model, timeout_s))
        assert isinstance(answer.tokenizer, TokenizerFiles)
        return answer.tokenizer

    def status(
        self, *, streams: bool = False, metrics: bool = False, timeout_s: float = ASK_S
    ) -> Status:
        """Returns the broker's workers, sessions and queues. ``streams`` adds the live streams that
        this client may see. ``metrics`` adds the counters and histograms."""
        answer = self.ask(status_call(timeout_s, streams, metrics))
        assert isinstance(answer.status, Status)
        return answer.status

    def buffer(self, name: str, content: Prompt, *, timeout_s: float = ASK_S) -> None:
        """Stores a part of a prompt at the broker, under a name. The prompt of a request with
        ``buffers=[name]`` begins with this part."""
        self.ask(buffer_call(name, content, timeout_s))
        self._sent_buffers[name] = content

    def drop_buffer(self, name: str, *, timeout_s: float = ASK_S) -> None:
        """Deletes a buffer. An unknown name is not an error."""
        self.ask(buffer_call(name, None, timeout_s))
        self._sent_buffers.pop(name, None)

    def upload_controller(
        self,
        wasm: bytes | Path,
        tag: str | None = None,
        *,
        by: str = "",
        timeout_s: float = UPLOAD_S,
    ) -> StoredModule:
        """Stores a controller: a Wasm module, given as bytes or as a file, or the file of a script
        (``.py``, ``.js``). Requests name the controller with ``controller=`` and the module's id.

        ``tag`` is a second name of the module, in addition to its id. If the module is already
        stored, only the tag is added. ``by``: if the client serves several users, the name of the
        user, for display next to the tag. Raises RequestError if the module is not valid.
        """
        return stored_module(self.ask(upload_call(wasm, tag, timeout_s, by)))

    def tag_controller(
        self, module: str, *tags: str, by: str = "", timeout_s: float = ASK_S
    ) -> StoredModule:
        """Assigns ``tags`` to the module with this id or tag, and removes them from other modules.

        ``by``: as in ``upload_controller``.
        """
        return stored_module(self.ask(tag_call(module, tags, timeout_s, by)))

    def controllers(self, *, timeout_s: float = ASK_S) -> list[StoredModule]:
        """The uploaded controller modules, the latest first."""
        return stored_modules(self.ask(tags_call(timeout_s)))

    def delete_controller(self, name: str, *, timeout_s: float = ASK_S) -> StoredModule:
        """Deletes a tag, or a module and all its tags. ``name`` is the tag or the module id."""
        return stored_module(self.ask(delete_call(name, timeout_s)))

    def close(self) -> None:
        """Ends the session and all of its streams."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def ask(self, call: Call) -> Msg:
        """The answer to a call that is not a stream. Other modules of the package use this
        method."""
        return answer_to(self.begin(call))

    def begin(self, call: Call) -> Stream:
        """Sends a call that is not a stream. ``answer_to`` then waits for the answer."""
        return Stream(self, self._connection, call, None)


def answer_to(begun: Stream) -> Msg:
    """The answer to a call that was sent by ``Client.begin``."""
    begun.wait()
    return begun.answer or Msg(stream_id=0)
