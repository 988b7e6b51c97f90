"""What goes into the engine and what comes out: requests, events, statistics. Free of MLX."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.guide import Guide
from kvdb.errors import UsageError
from kvdb.sequences import MAX_TTL_SECONDS

Reuse = Literal["max", "exact"]
Skip = Literal["full", "refill", "partial", "approximate", "none"]
FinishReason = Literal["stop", "length", "cancelled", "deadline"]
Priority = Literal["interactive", "batch"]
HoldState = Literal["held", "share full", "not stored"]
Message = Mapping[str, Any]
MAX_ANSWERS = 128
# Takes the tokens of the answer so far, and logits: an MLX array ``(1, vocabulary)``. Gives other
# logits. It runs on the engine's thread, for every token.
LogitsProcessor = Callable[[Sequence[int], Any], Any]
MOST_BIAS = 1e30


def _is_text(value: object) -> bool:
    """Text that can be stored: JSON may also hold halves of characters."""
    return isinstance(value, str) and not any("\ud800" <= char <= "\udfff" for char in value)


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < MOST_BIAS


def _is_bias(value: object) -> bool:
    return _is_finite(value) or value == float("-inf")  # never that token


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is chosen from logits; the names and meanings are mlx-lm's own.

    ``seed`` None draws one. Equal seeds give equal tokens, whatever else the engine does.
    """

    temperature: float = 0.0
    top_p: float = 0.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    logit_bias: Mapping[int, float] | None = None
    repetition_penalty: float | None = None
    repetition_context: int = 20
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    def __post_init__(self) -> None:
        checks = (
            ("temperature", 0 <= self.temperature < float("inf")),
            ("top_p", 0 <= self.top_p <= 1),
            ("min_p", 0 <= self.min_p <= 1),
            ("top_k", self.top_k >= 0),
            ("repetition_penalty", self.repetition_penalty is None or self.repetition_penalty > 0),
            ("repetition_context", 0 < self.repetition_context < 1 << 31),
            ("presence_penalty", _is_finite(self.presence_penalty or 0)),
            ("frequency_penalty", _is_finite(self.frequency_penalty or 0)),
            ("logit_bias", all(map(_is_bias, (self.logit_bias or {}).values()))),
            ("seed", self.seed is None or type(self.seed) is int),
        )
        for name, good in checks:
            if not good:
                raise UsageError(f"{name} cannot be {getattr(self, name)}.")


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in a chat: the end of message (or tool) ``index``, with all that stands before it, or
    ``characters`` into the text of that message. What is stored up to there is held for
    ``ttl_seconds``, as far as its tenant may hold more."""

    index: int
    ttl_seconds: float
    tool: bool = False
    characters: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.ttl_seconds < float("inf"):
            raise UsageError(f"ttl_seconds must be above 0, not {self.ttl_seconds}.")


@dataclass(frozen=True, slots=True)
class Hold:
    """What became of a mark: the first ``tokens`` of the prompt are held for ``ttl_seconds``, or
    are not, as the tenant's share is full or they are not stored. No tokens: its place could not be
    told."""

    tokens: int
    ttl_seconds: float
    state: HoldState


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, as exactly one of text, chat messages or token ids, and what to do with it.

    ``stop`` are texts that end generation and are not part of the output; ``stop_tokens`` are ids
    that end it besides the model's own, which ``ignore_eos`` switches off. ``logprobs`` is how
    many most likely tokens to report beside the chosen one, None for none of it. ``reuse`` is
    ``max`` (state equal up to rounding) or ``exact`` (the bits of a cold exact run); ``read`` and
    ``store`` say whether stored state is used, and whether new state is kept. ``boundaries`` are
    numbers of tokens after which another request may go on differently, as after the last message
    before the answer: recurrent layers keep a state there. ``marks`` are such places too, told by
    message, and each holds what is stored up to there.

    ``remember``: the tokens of the answer to a chat are kept, so that a later chat that repeats it
    as text gets the very tokens whose state is stored (engine/prompt/memory.py).

    ``salt`` gives it a key space of its own. ``ttl_seconds`` holds its state in the store for that
    long, as far as its tenant may hold more. ``priority`` batch waits for interactive ones, and
    ``deadline_ms`` after it was handed in it ends, whatever it has by then. ``n`` answers come
    from one prompt: their tokens and ends carry an index.

    ``guide`` is what the answer must be, such as JSON by a schema. ``processors`` make the logits
    processors of each answer, which run between those of ``sampling`` and the guide's; what is
    stored are the model's raw logits. A processor gets the answer's tokens so far, as it also may
    after some were taken back.

    ``approximate`` lets stored blocks whose state is gone be left out of attention instead of being
    computed again: at most 5 % of what is stored of the prompt, never its first block, nor anything
    from the last user's message on, and only in chats and where all layers are of full attention
    (docs/approximate.md). ``measure_kl`` computes the exact answer's logits behind an answer that
    left something out, which costs what was saved: how far the two are apart is in Stats.kl.
    """

    text: str | None = None
    messages: Sequence[Message] | None = None
    tokens: Sequence[int] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    ignore_eos: bool = False
    sampling: Sampling = field(default_factory=Sampling)
    logprobs: int | None = None
    reuse: Reuse = "max"
    read: bool = True
    store: bool = True
    remember: bool = True
    boundaries: tuple[int, ...] = ()
    marks: tuple[Mark, ...] = ()
    tenant: str = ""
    client: str = ""
    salt: bytes = b""
    ttl_seconds: float | None = None
    priority: Priority = "interactive"
    deadline_ms: float | None = None
    n: int = 1
    approximate: bool = False
    measure_kl: bool = False
    processors: tuple[Callable[[], LogitsProcessor], ...] = ()
    guide: Guide | None = None

    def __post_init__(self) -> None:
        given = sum(value is not None for value in (self.text, self.messages, self.tokens))
        if given != 1:
            raise UsageError("A request needs exactly one of text, messages and tokens.")
        if type(self.max_tokens) is not int:
            raise UsageError(f"max_tokens must be an integer, not {self.max_tokens!r}.")
        if self.max_tokens < 1:
            raise UsageError(f"max_tokens must be at least 1, not {self.max_tokens}.")
        if self.reuse not in ("max", "exact"):
            raise UsageError(f"reuse must be 'max' or 'exact', not {self.reuse!r}.")
        if self.approximate and self.reuse == "exact":
            raise UsageError("reuse 'exact' cannot be approximate.")
        if self.guide is not None and self.ignore_eos:
            raise UsageError("A guided answer ends by the end token: ignore_eos cannot be used.")
        if self.measure_kl and not self.approximate:
            raise UsageError("measure_kl needs approximate: what is exact has no KL.")
        if self.logprobs is not None and self.logprobs < 0:
            raise UsageError(f"logprobs must not be negative, not {self.logprobs}.")
        if self.priority not in ("interactive", "batch"):
            raise UsageError(f"priority must be 'interactive' or 'batch', not {self.priority!r}.")
        if self.deadline_ms is not None and not self.deadline_ms > 0:
            raise UsageError(f"deadline_ms must be above 0, not {self.deadline_ms}.")
        if self.ttl_seconds is not None and not 0 < self.ttl_seconds < MAX_TTL_SECONDS:
            raise UsageError(f"ttl_seconds must be above 0, and not {self.ttl_seconds}.")
        if not (_is_text(self.tenant) and _is_text(self.client)):
            raise UsageError("tenant and client must be text.")
        if type(self.n) is not int or not 1 <= self.n <= MAX_ANSWERS:
            raise UsageError(f"n must be from 1 to {MAX_ANSWERS}, not {self.n!r}.")
        if not isinstance(self.salt, bytes):
            raise UsageError("salt must be bytes.")
        if isinstance(self.stop, str) or "" in self.stop:
            raise UsageError("stop must be a tuple of texts that are not empty.")


@dataclass(frozen=True, slots=True)
class Stats:
    """What one request cost. restored + refilled + computed + masked = prompt tokens, unless it was
    cancelled before its prompt was done.

    ``forwarded_tokens`` were counted in the model call itself, ``forwarded_prompt_tokens`` of them
    before the first decode step. ``matched_tokens`` were found, whatever was then restored.
    ``bytes_read`` came from shards, ``bytes_ram`` from the RAM tier, ``bytes_remote`` from remotes:
    the state of ``remote_tokens``. An answer that shares another's prompt has restored it, without
    reading anything. ``shared_steps`` decode steps were
    made together with other requests'; ``alone`` says why none can be, where that is so. ``held``
    says whether the state is held for its ``ttl_seconds``, ``holds`` what became of each mark.

    ``masked_tokens`` were left out by an approximate skip, whose state is not stored; ``unmasked``
    says why holes were refilled though the request was ``approximate``. ``kl`` is the mean of
    KL(exact ‖ approximate), in nats, over the first 16 tokens of the answer; None where it was not
    measured. What measuring forwards is not counted, but ``total_ms`` includes its time.

    ``first_token_ms`` and ``total_ms`` are milliseconds since the engine took the request, the
    others are durations. ``load_ms`` (of the model) and the engine's part of ``warmup_ms`` (its
    set-up, besides encoding the prompt) fall on the first request; ``queued_ms`` is the time until
    it began. The time to the first token is ``ttft_ms``: the sum of the durations, less
    ``behind_ms``, in which the state behind a first token sampled from stored logits was restored.
    """

    prompt_tokens: int
    matched_tokens: int = 0
    restored_tokens: int = 0
    refilled_tokens: int = 0
    computed_tokens: int = 0
    masked_tokens: int = 0
    generated_tokens: int = 0
    forwarded_tokens: int = 0
    forwarded_prompt_tokens: int = 0
    skip: Skip = "none"
    miss_reason: str | None = None
    bytes_read: int = 0
    bytes_ram: int = 0
    bytes_remote: int = 0
    remote_tokens: int = 0
    shared_steps: int = 0
    alone: str | None = None
    held: bool = False
    holds: tuple[Hold, ...] = ()
    unmasked: str | None = None
    kl: float | None = None
    load_ms: float = 0.0
    warmup_ms: float = 0.0
    queued_ms: float = 0.0
    lookup_ms: float = 0.0
    restore_ms: float = 0.0
    prefill_ms: float = 0.0
    first_sample_ms: float | None = None
    behind_ms: float = 0.0
    first_token_ms: float | None = None
    total_ms: float = 0.0

    @property
    def ttft_ms(self) -> float | None:
        """Time to the first token, loading and warm-up included; None when there was none."""
        if self.first_sample_ms is None:
            return None
        before = self.load_ms + self.warmup_ms + self.queued_ms + self.lookup_ms
        state = self.restore_ms + self.prefill_ms - self.behind_ms
        return before + state + self.first_sample_ms


@dataclass(frozen=True, slots=True)
class Progress:
    """``done`` of ``total`` prompt tokens have their state."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token. ``text`` is what became printable with it, maybe nothing yet."""

    id: int
    text: str
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    index: int = 0


@dataclass(frozen=True, slots=True)
class End:
    """The last event of an answer. ``text`` is what was held back until the end was certain,
    ``stop_text`` the one of the request's stop texts that ended it."""

    reason: FinishReason
    text: str
    stats: Stats
    index: int = 0
    stop_text: str | None = None


Event = Progress | Token | End


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine has to do, and the memory that it takes.

    ``running`` requests have begun, ``prefilling`` of them work on their prompts; ``paused`` ones
    gave their place to more urgent ones, ``waiting`` ones have not begun. The others decode, in
    ``batches``. ``padded_bytes`` of the ``state_bytes`` only make rows of batches equally long.
    """

    running: int = 0
    prefilling: int = 0
    paused: int = 0
    waiting: int = 0
    batches: int = 0
    state_bytes: int = 0
    padded_bytes: int = 0
