"""Reads the settings. A flag overrides an environment variable ``TOKENBUS_*``, which overrides
``tokenbus.toml``, which overrides the default.

All programs share one flat list of settings. So each program can refuse a misspelt name.
"""

from __future__ import annotations

import difflib
import os
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta, Struct

from .decoders import convert
from .endpoints import numbered, separate
from .expected_values import expected
from .model_names import AdapterNameError, AliasError, Aliases, adapter_folders

Positive = Annotated[float, Meta(gt=0)]
AtLeastOne = Annotated[int, Meta(ge=1)]
AtLeastZero = Annotated[int, Meta(ge=0)]

PREFIX = "TOKENBUS_"
CONFIG = "TOKENBUS_CONFIG"
"""The environment variable with the path of the settings file; default: ``./tokenbus.toml``."""


class SettingError(Exception):
    """A setting is unknown or its value is invalid; the message names the setting and its
    source."""


class Settings(Struct, kw_only=True, frozen=True):
    """All settings. Times are in seconds, sizes in bytes."""

    run_dir: str = ""
    """The run directory: the folder for sockets, logs and process ids of a running system. If
    empty, a folder of this user in the machine's temporary folder."""
    brokers: AtLeastOne = 1
    """Number of broker processes. If only the first broker's addresses are given, the addresses of
    the other brokers are derived from them."""
    front: str = "tcp://127.0.0.1:5555"
    """The address at which clients connect, or the addresses of several brokers, separated by
    commas."""
    back: str = ""
    """The address at which workers connect, or several addresses as in ``front``; if empty,
    ``ipc://<run dir>/back.sock``."""
    keys: str = ""
    """The folder of the broker's keys; if empty, ``<run dir>/keys``. If this folder does not exist,
    the broker does not use keys, and programs may only listen on addresses of this machine."""
    key: str = ""
    """The key file with which this program connects. If empty, the program uses this machine's key
    file in the folder of keys, or no key if this file does not exist."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["human", "json"] = "human"
    """``human``: lines for people. ``json``: one JSON object in each line."""
    health_file: str = ""
    """A file that this process touches while it works, so that probes can check the process. If
    empty, there is no such file."""
    session_timeout_s: Positive = 30.0
    """Maximum time for which a client waits for a broker that does not answer."""
    command_timeout_s: Positive = 3.0
    """Like ``session_timeout_s``, for the client of a command."""

    model: str = "embedded"
    """The model of the GPU workers: a path, a hub id, ``embedded`` or ``auto``. With ``auto``,
    models are loaded on demand."""
    allow: list[str] = []
    """Names or paths of the models that may be loaded on demand; ``*`` and ``?`` match as in a
    shell."""
    max_models: AtLeastOne = 2
    """Maximum number of models that a GPU worker keeps loaded; the least recently used one is
    evicted."""
    device: Annotated[str, Meta(pattern=r"^(auto|(cpu|cuda|mps|xpu)(:\d+)?)$")] = "auto"
    """The device of the models: ``auto``, ``cpu``, ``cuda``, or one device such as ``cuda:1``."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The data type of the weights; ``auto`` is float32 on the CPU, and the checkpoint's own data
    type on a GPU."""
    quantize: Literal["none", "int8", "int4"] = "none"
    """Quantize the weights of a model when it is loaded, and measure the loss. With ``int4``, the
    ``dtype`` ``auto`` is bfloat16."""
    lora: list[str] = []
    """LoRA adapters of ``model``, each as ``NAME=FOLDER``; the folder has PEFT's layout. A request
    chooses an adapter if its model is ``NAME``."""
    trust_remote_code: bool = False
    """Run Python code that a checkpoint contains, with the worker's rights."""
    kv_cache_bytes: AtLeastZero = 0
    """Size of the KV cache; if 0, the worker derives the size from the memory of the device."""
    max_running: AtLeastOne = 256
    """Maximum number of sequences in one batch."""
    capacity: AtLeastOne = 512
    """Maximum number of requests assigned to one GPU worker, including waiting requests. Further
    requests queue at the broker."""
    require_fast_attention: bool = False
    """Refuse a model if no attention kernel can read its KV cache blocks in place."""
    exact: Literal["auto", "on", "off"] = "auto"
    """Compute logits with the same bits in every batch. ``auto``: only for models for which the
    worker's kernels can do this. ``on``: refuse other models. ``off``: never."""
    compile: bool = False
    """Run models through torch.compile, which needs a C++ compiler on a CPU."""
    speculation: Literal["auto", "off"] = "auto"
    """``auto``: draft likely next tokens of a sequence, and verify several of them in one step."""
    draft_model: str = ""
    """A small model that drafts tokens: its path or hub id. It must have the same tokenizer. The
    worker drafts with this model if a sequence's text has no repetition to draft from. If empty,
    there is no draft model."""
    overlap: Literal["auto", "on", "off"] = "auto"
    """Launch the forward of a step before the tokens of the previous step are processed, so that
    the device does not wait for the worker's Python. ``auto``: only on a GPU."""
    tp: AtLeastOne = 1
    """Number of devices over which each GPU worker spreads its model (tensor parallelism)."""
    threads: AtLeastZero = 0
    """Number of CPU threads of torch in a GPU worker; if 0, the worker chooses the fastest number,
    up to the number of cores."""

    controller_init_ms: Positive = 1000.0
    """CPU time limit of ``init_prompt`` and of starting a module, in milliseconds."""
    controller_pre_ms: Positive = 1.0
    """CPU time limit of ``pre_process``, in milliseconds."""
    controller_mid_ms: Positive = 20.0
    """CPU time limit of ``mid_process``, in milliseconds."""
    controller_post_ms: Positive = 1.0
    """CPU time limit of ``post_process``, in milliseconds."""
    controller_script_ms: Positive = 100.0
    """CPU time limit of each call of a script except ``init_prompt``, in milliseconds. For scripts,
    it replaces the three limits above, because an interpreter executes a program 20 to 50 times as
    slowly as compiled code."""
    controller_decision_s: Positive = 300.0
    """Maximum time that a GPU worker waits for a controller's decision, in addition to the
    controller's own time limits. After this time, the sequence ends. The first decision includes
    the start of the controller: compiling a grammar may take 100 seconds."""
    controller_fuel_per_ms: AtLeastZero = 0
    """Number of Wasm instructions that a controller may execute for each millisecond of its CPU
    time limits. A call that executes more instructions fails on every machine, fast or slow. The
    CPU time limits are a second longer in this case. If 0, only CPU time is limited."""
    controller_memory_bytes: AtLeastOne = 64 * 1024 * 1024
    """Memory limit of the controller of one sequence."""
    controller_forks: AtLeastOne = 128
    """Maximum number of sequences of one request."""
    controller_idle_wakes: AtLeastOne = 10_000
    """If all sequences of a request are suspended, and none of them waits for an input or a tool,
    they are woken after 10 ms or later. After this number of such wake-ups in a row, the sequences
    end with ``deadlock``."""
    controller_threads: AtLeastZero = 0
    """Number of threads that run controllers; 0: twice the number of CPUs, at least four."""
    guest_processes: AtLeastZero = 64
    """Maximum number of guest processes of one controller worker. Uploaded modules run in guest
    processes. Each guest process runs the modules of one client key for one tokenizer. If clients
    have no keys, it runs the modules of one session. If 0, modules run on the worker's threads."""
    guest_user: str = ""
    """The user under which guest processes run. The worker needs the right to change users. If
    empty, guest processes run under the worker's own user."""
    grammar_compile_s: Positive = 1.5
    """CPU time limit of compiling a pattern, a schema or a Lark grammar, in seconds. When the limit
    is exceeded, the compiler searches for the slow part, which the error names. This takes up to a
    quarter of the limit."""
    grammar_compile_bytes: AtLeastOne = 1024 * 1024 * 1024
    """Memory limit of the process in which grammars are compiled."""
    controller_capacity: AtLeastOne = 1024
    """Maximum number of requests whose controllers one worker runs."""
    allow_tools: list[str] = []
    """Names of the tools that the programs of every client may call; ``*`` and ``?`` match as in a
    shell. If a client's key has a list of its own, that list applies instead. If no list names a
    tool, only the operator's programs may call the tool."""
    tool_timeout_s: Annotated[float, Meta(gt=0, le=600)] = 30.0
    """Maximum time of a call, for tools that do not have their own time-out."""
    tool_threads: AtLeastOne = 16
    """Maximum number of functions without ``async`` that a tool worker runs at the same time, each
    on a thread."""
    tool_capacity: AtLeastOne = 256
    """Maximum number of calls that a tool worker accepts at the same time, including calls that
    wait for a thread."""

    tools: list[str] = []
    """Modules, or files that end with ``.py``. ``tokenbus up`` runs one tool worker for each of
    them."""
    mcp: list[str] = []
    """Commands of MCP servers. ``tokenbus up`` runs one tool worker for each of them."""

    join: str = ""
    """The address at which a broker on another machine accepts workers, as ``HOST`` or
    ``HOST:PORT`` (default port: 5556). ``tokenbus up`` then runs only GPU and controller workers,
    which connect to this address."""
    gpu_workers: AtLeastZero = 1
    """Number of GPU worker processes of ``tokenbus up``."""
    controller_workers: AtLeastZero = 1
    """Number of controller worker processes of ``tokenbus up``. If this number is above 0, a state
    worker runs too."""
    ray: str = ""
    """The Ray cluster in which ``tokenbus up`` places GPU and controller workers: its address, or
    ``auto`` for the cluster on this machine. If empty, the workers run on this machine, without
    Ray."""
    max_gpu_workers: AtLeastZero = 0
    """In a Ray cluster, the maximum number of GPU workers; ``gpu_workers`` is the minimum."""
    max_controller_workers: AtLeastZero = 0
    """In a Ray cluster, the maximum number of controller workers."""
    scale_up_s: Positive = 5.0
    """In a Ray cluster: workers are added after more workers have been needed for this time."""
    scale_down_s: Positive = 120.0
    """In a Ray cluster: a worker is removed after fewer workers have been sufficient for this
    time."""
    http: str = "127.0.0.1:8080"
    """Address where the gateways listen for HTTP and WebSocket. If ``none``, no gateway runs."""
    gateways: AtLeastOne = 1
    """Number of gateway processes of ``tokenbus up``. Several gateways share the port by
    SO_REUSEPORT."""
    api_keys: str = ""
    """A file of hashed API keys. If it is given, every path except ``/live`` and ``/ready`` needs a
    key."""
    operator_over_http: bool = False
    """If the gateways have no API keys: accept the operator's requests over HTTP, for example
    ``/pause``."""
    tls_cert: str = ""
    """The certificate (PEM) of the gateways, for HTTPS. ``tls_key`` must be given too."""
    tls_key: str = ""
    """The private key of the certificate."""
    max_connections: AtLeastOne = 10_000
    """Maximum number of open connections of one gateway, including WebSockets."""
    max_unread: AtLeastOne = 16_384
    """Maximum number of unread entries of a stream that a gateway stores for an HTTP client. A
    stream with more unread entries ends."""
    cors: list[str] = []
    """Origins whose pages may use the gateways, for example ``https://example.org``; ``*`` stands
    for all origins."""
    trust_request_chat_template: bool = False
    """Render chat templates that requests contain. If false, the gateway refuses the field
    ``chat_template``."""
    served_model_name: list[str] = []
    """Additional model names for HTTP requests: ``NAME`` for the default model, or ``NAME=MODEL``.
    A name may have ``*`` and ``?``, for example ``claude-*``."""
    strict_fields: bool = False
    """Refuse fields of HTTP requests that a gateway does not know. If false, such fields have no
    effect, and the header ``x-tokenbus-ignored`` of the answer names them."""
    drain_s: Positive = 30.0
    """Maximum time for which a worker that is stopped continues its running requests."""
    linger_s: Positive = 3600.0
    """Maximum time for which a gateway continues its streams after another gateway has taken its
    place."""

    # ``BrokerSettings`` (broker/settings.py) describes the following settings.
    heartbeat_s: Positive = 1.0
    expiry_s: Positive = 5.0
    hung_step_s: Positive = 60.0
    move_wait_s: Positive = 120.0
    ping_s: Positive = 2.0
    session_expiry_s: Positive = 10.0
    session_grace_s: Positive = 5.0
    session_cut_s: Positive = 30.0
    max_keep_s: Annotated[float, Meta(ge=0)] = 3600.0
    recover_s: Positive = 30.0
    session_idle_s: Positive = 3600.0
    max_priority: Annotated[int, Meta(ge=0, le=100)] = 0
    """The highest priority of a request if the broker has no keys."""
    max_sessions: AtLeastOne = 10_000
    max_queued: AtLeastZero = 10_000
    max_queued_bytes: AtLeastOne = 1024 * 1024 * 1024
    max_streams: AtLeastOne = 4_096
    max_buffer_bytes: AtLeastOne = 64 * 1024 * 1024
    max_buffers: AtLeastOne = 4_096
    max_total_buffer_bytes: AtLeastOne = 1024 * 1024 * 1024
    max_journal_bytes: AtLeastZero = 128 * 1024 * 1024
    max_total_journal_bytes: AtLeastOne = 1024 * 1024 * 1024
    max_pending_bytes: AtLeastOne = 4 * 1024 * 1024

    @property
    def run_folder(self) -> Path:
        """The run directory."""
        if self.run_dir:
            return Path(self.run_dir)
        return Path(tempfile.gettempdir()) / f"tokenbus-{os.getuid()}"

    @property
    def keys_folder(self) -> Path:
        """The folder of the broker's keys, whether it exists or not."""
        return Path(self.keys) if self.keys else self.run_folder / "keys"

    @property
    def back_endpoint(self) -> str:
        """The address at which workers connect; addresses of several brokers are separated by
        commas."""
        return _of_all(self.back or f"ipc://{self.run_folder}/back.sock", self.brokers)

    @property
    def front_endpoint(self) -> str:
        """The address at which clients connect; addresses of several brokers are separated by
        commas."""
        return _of_all(self.front, self.brokers)

    def of_broker(self, number: int) -> Settings:
        """The settings of one of several brokers. ``front`` and ``back`` of the result are this
        broker's own addresses.

        Raises SettingError if the settings have no address for this broker.
        """
        fronts, backs = separate(self.front_endpoint), separate(self.back_endpoint)
        if number >= min(len(fronts), len(backs)):
            raise SettingError(
                f"broker {number} has no address: 'front' has {len(fronts)} addresses and 'back' "
                f"has {len(backs)}; give each an address for every broker, or set 'brokers'"
            )
        return msgspec.structs.replace(self, brokers=1, front=fronts[number], back=backs[number])


_LISTS = {
    "allow": ",",
    "allow_tools": ",",
    "cors": ",",
    "lora": ",",
    "mcp": "\n",
    "served_model_name": ",",
    "tools": ",",
}
"""The settings that are lists. Each has the separator of its values in an environment variable.
Commands of ``mcp`` are separated by line ends, because a command may contain commas."""
NAMES = frozenset(field.name for field in msgspec.structs.fields(Settings))


def resolve(
    flags: Mapping[str, Any], environ: Mapping[str, str], file: Mapping[str, Any], file_name: str
) -> Settings:
    """Computes the settings that apply. ``flags``: the settings of the command line; None stands
    for a setting that was not given.

    Raises SettingError for the first setting that is unknown or invalid, with its name and source.
    """
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    for name, value in file.items():
        _known(name, f"{name} in {file_name}")
        values[name], places[name] = value, f"{name} in {file_name}"
    for variable, text in environ.items():
        if variable.startswith(PREFIX) and variable != CONFIG:
            name = variable.removeprefix(PREFIX).lower()
            _known(name, variable)
            values[name], places[name] = _from_text(name, text), variable
    for name, value in flags.items():
        if value is not None:
            values[name], places[name] = value, "--" + name.replace("_", "-")
    for name, value in values.items():
        try:
            convert({name: value}, Settings, strict=False)
        except msgspec.ValidationError as error:
            raise SettingError(f"{places[name]}: {_fault(name, value, error)}") from None
    return _checked(convert(values, Settings, strict=False))


def _checked(settings: Settings) -> Settings:
    """Returns the settings. Raises SettingError if the number of addresses does not match the
    number of brokers, or if an entry of ``served_model_name`` or ``lora`` is not valid."""
    try:
        Aliases(settings.served_model_name)
    except AliasError as error:
        raise SettingError(f"served_model_name: {error}") from None
    try:
        adapter_folders(settings.lora, settings.model)
    except AdapterNameError as error:
        raise SettingError(f"lora: {error}") from None
    try:
        _of_all(settings.front, settings.brokers)
        _of_all(settings.back, settings.brokers)
    except ValueError as error:
        raise SettingError(str(error)) from None
    return settings


def _of_all(addresses: str, brokers: int) -> str:
    """The addresses of all brokers, separated by commas. If only the first address is given, the
    others are derived from it (``numbered``)."""
    if brokers == 1 or not addresses:
        return addresses
    given = separate(addresses)
    if len(given) not in (1, brokers):
        raise ValueError(
            f"{addresses!r} has {len(given)} addresses for {brokers} brokers; give one for each, "
            "or only the first"
        )
    if len(given) == 1:
        given = [numbered(given[0], number) for number in range(brokers)]
    return ",".join(given)


def load(**flags: Any) -> Settings:
    """The settings of this process, from ``flags``, the environment and the settings file. Raises
    SettingError if the file cannot be read or a setting is not valid."""
    name = os.environ.get(CONFIG, "")
    path = Path(name or "tokenbus.toml")
    file: dict[str, Any] = {}
    if name or path.is_file():
        try:
            file = tomllib.loads(path.read_text())
        except OSError as error:
            raise SettingError(f"cannot read {path}: {error.strerror}") from None
        except ValueError as error:
            raise SettingError(f"cannot read {path}: {error}") from None
    return resolve(flags, os.environ, file, str(path))


def environment(settings: Settings) -> dict[str, str]:
    """The environment variables ``TOKENBUS_*`` that pass these settings to another process."""
    given: dict[str, str] = {}
    for field in msgspec.structs.fields(Settings):
        value = getattr(settings, field.name)
        text = _LISTS[field.name].join(value) if isinstance(value, list) else str(value)
        given[PREFIX + field.name.upper()] = text
    return given


def _from_text(name: str, text: str) -> Any:
    if name in _LISTS:
        return [part.strip() for part in text.split(_LISTS[name]) if part.strip()]
    return text


def _fault(name: str, value: object, error: msgspec.ValidationError) -> str:
    """An error text with the values that a setting may have, and with the value that was given."""
    kind = next(f.type for f in msgspec.structs.fields(Settings) if f.name == name)
    if get_origin(kind) is Literal:
        return f"expected one of {', '.join(get_args(kind))}, not {value!r}"
    if name == "device":
        return f"expected auto, cpu, cuda, or one device such as cuda:1, not {value!r}"
    return expected(error, value)


def _known(name: str, place: str) -> None:
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, 1)
        hint = (
            f"; did you mean {near[0]!r}?" if near else f"; valid names: {', '.join(sorted(NAMES))}"
        )
        raise SettingError(f"{place}: unknown setting {name!r}{hint}")
