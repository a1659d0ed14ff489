"""The sampling fields of ``GENERATE``."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

NonNegative = Annotated[float, Meta(ge=0)]
Probability = Annotated[float, Meta(ge=0, le=1)]
TokenId = Annotated[int, Meta(ge=0, le=0xFFFF_FFFF)]

MAX_TOP_LOGPROBS = 256
MAX_STOP = 64
MAX_STOP_CHARS = 1024
"""Maximum number of characters of a stop string. A worker may hold back up to this number of
characters of a sequence, because they may be the beginning of a stop string."""
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
MAX_N = 128
MAX_KEPT = 1024
"""Maximum number of candidates whose ids an entry reports. If a token had more candidates, the
entry only reports their number."""
SAMPLING_VERSION = 3
"""The version of the sampling algorithm of GPU workers. If a change of the algorithm gives other
tokens for equal seeds, this number increases."""
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
MAX_QUERY_TOP = 64
MAX_QUERY_TOKENS = 256
Seed = Annotated[int, Meta(ge=0, le=0x7FFF_FFFF_FFFF_FFFF)]


class Sampling(Struct, kw_only=True, omit_defaults=True):
    """The sampling parameters of one request. Parameters of LMTP have LMTP's names. The other
    parameters have the names of vLLM and OpenAI.

    The parameters are applied to a row of logits ``[vocab]`` in this order. First, ``logit_bias``
    is added. Then the three penalties, a controller's mask and ``min_tokens`` apply, and the logits
    are divided by ``temperature``. Finally ``top_k``, ``top_p`` and ``min_p`` exclude tokens, in
    that order.
    The reported ``logprob`` is computed before all these steps.
    """

    temperature: NonNegative = 0.0
    """0 takes the most likely token (greedy); 1 samples from the model's own distribution."""
    max_tokens: Annotated[int, Meta(ge=1)] = 64
    """Maximum number of tokens to generate. The context length of the model is a bound too. Both
    bounds end the sequence with the finish reason ``length``."""
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    """Minimum number of tokens to generate, at most ``max_tokens``. Before this number is reached,
    end-of-sequence tokens and token ids of ``stop`` are not sampled, and strings of ``stop`` do not
    end the sequence. A controller can still end the sequence: if its mask allows only tokens that
    end the sequence, one of them is sampled."""
    logit_bias: dict[TokenId, float] = {}
    """Added to the logits of these tokens, by id. In practice, -100 forbids a token and 100 forces
    it."""
    top_logprobs: TopLogprobs = 0
    """Number of the most likely tokens to report, in addition to the sampled token."""
    top_k: Annotated[int, Meta(ge=0)] = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Keep the smallest set of tokens whose total probability reaches this value (nucleus
    sampling)."""
    min_p: Probability = 0.0
    """Keep the tokens whose probability is at least this fraction of the most likely token's
    probability."""
    repetition_penalty: Annotated[float, Meta(gt=0)] = 1.0
    """Divides the positive logits, and multiplies the negative logits, of tokens in the prompt or
    the output (CTRL)."""
    presence_penalty: float = 0.0
    """Subtracted once from the logits of tokens that were already generated."""
    frequency_penalty: float = 0.0
    """Subtracted for each occurrence from the logits of tokens that were already generated."""
    seed: Seed | None = None
    """Determines the random numbers, which do not depend on the batch. Two equal requests with the
    same seed get the same tokens if their logits have the same bits (``Span.exact``). If None, the
    seed is derived from the id that the broker assigns to the request."""
    stop: Annotated[list[StopString | TokenId], Meta(max_length=MAX_STOP)] = []
    """Strings and token ids that end the sequence, in addition to the end-of-sequence tokens of the
    model. Strings are found across token boundaries."""
    processed_logprobs: bool = False
    """Whether entries have ``processed``: the log-probability under the distribution that the token
    was drawn from."""
    kept: bool = False
    """Whether entries have ``kept``: the candidates that the token was drawn from."""
    ignore_eos: bool = False
    """Do not end at the model's end-of-sequence token."""
    n: Annotated[int, Meta(ge=1, le=MAX_N)] = 1
    """Number of sequences to sample from this prompt. Their ``seq`` are 0 to n - 1."""


class Query(Struct, array_like=True, frozen=True):
    """A controller's question about the distribution that its next token is sampled from.

    The answer always has the token's log-probability, its rank and the entropy.
    """

    top: Annotated[int, Meta(ge=0, le=MAX_QUERY_TOP)] = 0
    """Number of the most likely tokens to report."""
    tokens: Annotated[list[TokenId], Meta(max_length=MAX_QUERY_TOKENS)] = []
    """Other tokens whose log-probabilities are to be reported."""


class Distribution(Struct, kw_only=True, omit_defaults=True):
    """The distribution that a token was sampled from: the answer to a controller's ``Query``.

    All numbers are of the model's own distribution, before biases, penalties, mask and temperature.
    Log-probabilities are natural; minus infinity is sent as the lowest float32.
    """

    logprob: float
    """Log-probability of the sampled token; 0 if the controller only read the distribution (the
    action ``look``)."""
    rank: int
    """Rank of the sampled token: 1 plus the number of more likely tokens; 0 if the controller only
    read the distribution."""
    entropy: float
    """Entropy of the distribution in nats."""
    top: dict[int, float] = {}
    """Log-probabilities of the most likely tokens by id, the most likely first."""
    scores: dict[int, float] = {}
    """Log-probabilities of the tokens that ``Query.tokens`` names, by id."""


MAX_SCORED_TEXTS = 64
MAX_SCORED_TOKENS = 4096
"""Maximum number of tokens of all texts that a program scores at once. Each token needs a row of
logits, and its log-probability is stored in the log of the stream."""
Scores = list[list[float]]
"""The natural log-probability of each token of each scored text, under the model's own
distribution. Minus infinity is sent as the lowest float32."""


class Override(Struct, array_like=True, frozen=True):
    """Sampling parameters that a controller sets for its next token. If a field is None, the
    request's parameter applies."""

    temperature: NonNegative | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    seed: Seed | None = None
