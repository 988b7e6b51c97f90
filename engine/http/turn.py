"""One turn, whatever the dialect: what is asked becomes an engine request, and the engine's events
become pieces of answers."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from engine.answers import (
    AnswerParser,
    ReasoningPiece,
    TextPiece,
    ToolCallStart,
)
from engine.answers import Piece as AnswerPiece
from engine.answers.forms import call_guide
from engine.events import End, Event, Progress, Request, Sampling, Stats, Token
from engine.guide import Guide
from engine.http.caller import Wishes, caller_of, read_wishes
from engine.http.errors import Stopping, TooLate
from engine.http.usage import Usage, usage_of
from kvdb.errors import UsageError

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest

    from engine.http.service import Answering, Limits, Served, Service
    from engine.http.tokens import TokenTexts
    from kvdb.segments import Segment

MAX_STOPS = 16
# Calls of one answer that must call tools.
MAX_CALLS = 8
# The parts of a prompt up to here are found within a millisecond or two.
SHORT_PROMPT = 2048
Reason = Literal["stop", "length", "tool_calls", "cancelled"]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the answer may (``auto``), must (``required``) or must not (``none``) call tools:
    only the one called ``name``, where that is given, and at most ``most`` calls if it must."""

    mode: Literal["auto", "required", "none"] = "auto"
    name: str | None = None
    most: int = MAX_CALLS


@dataclass(frozen=True, slots=True)
class Ask:
    """What a body asks for. ``prompt`` are keywords of :class:`engine.events.Request`: one of text,
    messages and tokens, and tools and template options; ``sampling`` those of Sampling. ``guide``
    is what the answer must be. What is None was not said."""

    prompt: Mapping[str, Any]
    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    stop: str | Sequence[str] | None = None
    logprobs: int | None = None
    n: int | None = None
    tool_choice: ToolChoice = ToolChoice()
    guide: Guide | None = None
    kvdb: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Text:
    """More of the answer's text."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of what the model says to itself."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The answer's tool call ``number`` (from 0) begins."""

    index: int
    number: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of a tool call's arguments."""

    index: int
    number: int
    text: str


@dataclass(frozen=True, slots=True)
class Likely:
    """A token that could have been next."""

    id: int
    text: str
    raw: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class Chosen:
    """The token that came next and the likeliest ones, where log probabilities were asked for."""

    index: int
    token: Likely
    top: tuple[Likely, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """The last piece of an answer; ``stop_text`` is the stop text that ended it."""

    index: int
    reason: Reason
    stop_text: str | None = None


Piece = Text | Reasoning | CallStart | CallArguments | Chosen | Ended | Progress


@dataclass(slots=True)
class Answer:
    """All pieces of one answer together."""

    text: str = ""
    reasoning: str = ""
    calls: list[dict[str, str]] = field(default_factory=list)
    tokens: list[Chosen] = field(default_factory=list)
    reason: Reason = "stop"

    def add(self, piece: Piece) -> None:
        if isinstance(piece, Text):
            self.text += piece.text
        elif isinstance(piece, Reasoning):
            self.reasoning += piece.text
        elif isinstance(piece, CallStart):
            self.calls.append({"id": piece.id, "name": piece.name, "arguments": ""})
        elif isinstance(piece, CallArguments):
            self.calls[piece.number]["arguments"] += piece.text
        elif isinstance(piece, Chosen):
            self.tokens.append(piece)
        elif isinstance(piece, Ended):
            self.reason = piece.reason


class Turn:
    """A request that was handed in, and its answers. Close it: that cancels what has not ended, as
    does the client's going away."""

    def __init__(
        self, service: Service, answering: Answering, http: HttpRequest, *, calls: bool
    ) -> None:
        """``calls``: the answers may have tool calls."""
        self.id = uuid.uuid4().hex
        self.created = int(service.now())
        self._service = service
        self._answering = answering
        self._texts: TokenTexts | None = None
        self._calls = calls
        self._parsers: dict[int, AnswerParser] = {}
        self._stats: dict[int, Stats] = {}
        self._segments: Sequence[Segment] = ()
        self._early: list[Event] = []
        self._watcher = asyncio.create_task(self._watch(http))

    @property
    def n(self) -> int:
        return self._answering.request.n

    @property
    def ended(self) -> bool:
        return len(self._stats) == self.n

    async def begun(self, seconds: float) -> None:
        """Wait for the first event: what is wrong with a request shows before any of its answer is
        sent. Not longer than ``seconds``, so that a stream can say that it is alive."""
        self._early = await self._answering.events(seconds)

    @property
    def prompt(self) -> Progress | None:
        """The prompt's tokens and how many were restored, where :meth:`begun` saw it."""
        return next((event for event in self._early if isinstance(event, Progress)), None)

    async def pieces(self, seconds: float | None = None) -> list[Piece]:
        """What came; nothing after ``seconds``. Raises what the engine raised, Stopping for an
        answer cut short by the server's end, TooLate for one that never began."""
        events, self._early = self._early, []
        if not events:
            events = await self._answering.events(seconds)
        pieces = [piece for event in events for piece in self._read(event)]
        if self.ended:
            self._segments = await self._find_segments(self._stats[0])
        return pieces

    async def answers(self) -> list[Answer]:
        """All answers, when they have ended."""
        answers = [Answer() for _ in range(self.n)]
        while not self.ended:
            for piece in await self.pieces():
                if not isinstance(piece, Progress):
                    answers[piece.index].add(piece)
        return answers

    def usage(self) -> Usage:
        """Once all have ended."""
        return usage_of([self._stats[i] for i in sorted(self._stats)], self._segments)

    def close(self) -> None:
        self._watcher.cancel()
        if not self._answering.ended:
            self._answering.cancel()

    async def _find_segments(self, stats: Stats) -> Sequence[Segment]:
        """The parts of a prompt that was not all known, to say in which of them it diverged. Those
        of a long one would keep others waiting."""
        if stats.matched_tokens >= stats.prompt_tokens:
            return ()
        if stats.prompt_tokens <= SHORT_PROMPT:
            return self._answering.segments()
        return await asyncio.to_thread(self._answering.segments)

    def _read(self, event: Event) -> Iterator[Piece]:
        if isinstance(event, Progress):
            yield event
            return
        parser = self._parser(event.index)
        if event.text:
            yield from self._pieces(event.index, parser, event.text)
        if isinstance(event, Token):
            if event.logprob is not None:
                yield self._chosen(event, event.logprob)
            return
        reason = self._end(event)
        if parser is not None:
            yield from _said(event.index, parser.end())
            if parser.calls and reason == "stop":
                reason = "tool_calls"
        yield Ended(event.index, reason, event.stop_text if reason == "stop" else None)

    def _pieces(self, index: int, parser: AnswerParser | None, text: str) -> Iterator[Piece]:
        if parser is None:
            yield Text(index, text)
        else:
            yield from _said(index, parser.feed(text))

    def _parser(self, index: int) -> AnswerParser | None:
        """What tells the parts of an answer to a chat; text that goes on has none."""
        request = self._answering.request
        if request.messages is None:
            return None
        parser = self._parsers.get(index)
        if parser is None:
            facts = self._service.facts(self._answering.model)
            if facts is None or facts.answer_style is None:
                return None
            style = facts.answer_style
            thinks = request.guide is None and style.opens_reasoning(self._answering.prompt_end)
            parser = self._parsers[index] = AnswerParser(
                style, request.tools if self._calls else None, _new_id, in_reasoning=thinks
            )
        return parser

    def _chosen(self, token: Token, logprob: float) -> Chosen:
        if self._texts is None:
            self._texts = self._service.texts(self._answering.model)
        texts = self._texts
        return Chosen(
            token.index,
            Likely(token.id, *texts[token.id], logprob),
            tuple(Likely(id_, *texts[id_], value) for id_, value in token.top_logprobs),
        )

    def _end(self, end: End) -> Reason:
        self._stats[end.index] = end.stats
        if end.reason == "cancelled" and self._answering.parked:
            raise Stopping(
                "The server was shut down before the answer was complete; what was computed is "
                "kept: ask again."
            )
        if end.reason == "deadline":
            if not end.stats.generated_tokens:
                raise TooLate("The time for this request was over before its answer began.")
            return "length"
        return end.reason

    async def _watch(self, http: HttpRequest) -> None:
        while (await http.receive())["type"] != "http.disconnect":
            continue
        self._answering.cancel()


def _said(index: int, pieces: Sequence[AnswerPiece]) -> Iterator[Piece]:
    for piece in pieces:
        if isinstance(piece, TextPiece):
            yield Text(index, piece.text)
        elif isinstance(piece, ReasoningPiece):
            yield Reasoning(index, piece.text)
        elif isinstance(piece, ToolCallStart):
            yield CallStart(index, piece.index, piece.id, piece.name)
        else:
            yield CallArguments(index, piece.index, piece.text)


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


async def begin(service: Service, http: HttpRequest, model: str, ask: Ask) -> Turn:
    """Hand in what ``http`` asks of ``model``. Raises what is wrong with it in one sentence."""
    served = service.find(model)
    wishes = read_wishes(http.headers, ask.kvdb, caller_of(http))
    request = request_of(ask, wishes, served, service.limits)
    choice = ask.tool_choice
    # What must be JSON may be a call instead.
    either = choice.mode == "auto" and ask.guide is not None and request.tools
    if choice.mode == "required" or either:
        style = (await service.loaded_facts(served.name)).answer_style
        otherwise = ask.guide if either else None
        guide = call_guide(style, request.tools or (), choice.name, choice.most, otherwise)
        request = replace(request, guide=guide)
    name = wishes.request_id or getattr(http.state, "request_id", None)
    calls = bool(request.tools) and choice.mode != "none"
    return Turn(service, service.open(served, request, name), http, calls=calls)


def request_of(ask: Ask, wishes: Wishes, served: Served, limits: Limits) -> Request:
    """The engine's request. Raises UsageError in one sentence."""
    check_size(ask, limits)
    sampling = {key: value for key, value in ask.sampling.items() if value is not None}
    deadline = wishes.deadline_ms
    if limits.request_seconds is not None:
        deadline = min(deadline or float("inf"), limits.request_seconds * 1e3)
    return Request(
        **ask.prompt,
        max_tokens=_max_tokens(ask, served, limits),
        stop=_stops(ask.stop),
        sampling=Sampling(**{**served.sampling, **sampling}),
        logprobs=ask.logprobs,
        n=1 if ask.n is None else ask.n,
        reuse=served.reuse,
        store=wishes.store,
        tenant=wishes.tenant,
        client=wishes.client,
        salt=wishes.salt,
        ttl_seconds=wishes.ttl_seconds,
        priority=wishes.priority,
        deadline_ms=deadline,
        approximate=wishes.approximate,
        guide=ask.guide,
    )


def _max_tokens(ask: Ask, served: Served, limits: Limits) -> int:
    """What the request or else the model's section says, as far as the server lets answers go:
    agents always ask for the most that their own vendor's models can say."""
    wanted = served.max_tokens if ask.max_tokens is None else ask.max_tokens
    return wanted if limits.max_tokens is None else min(wanted, limits.max_tokens)


def _stops(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > MAX_STOPS:
        raise UsageError(f"There may be at most {MAX_STOPS} stop texts, not {len(stops)}.")
    return stops


def check_size(ask: Ask, limits: Limits) -> None:
    """Raise UsageError for more messages than the server takes."""
    messages = ask.prompt.get("messages") or ()
    if len(messages) > limits.max_messages:
        raise UsageError(
            f"A request may have at most {limits.max_messages} messages, not {len(messages)}."
        )
