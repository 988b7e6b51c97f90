"""Anthropic's shapes: a message as it grows, whole or as the events of a stream; usage; errors."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from engine.events import Hold, Progress
from engine.http.errors import Problem
from engine.http.sse import frame
from engine.http.turn import CallArguments, CallStart, Ended, Piece, Reasoning, Text, Turn
from engine.http.usage import Usage
from engine.prompt.anthropic import TTL_SECONDS

PING = frame({"type": "ping"}, "ping")
ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use"}


def anthropic_error(problem: Problem) -> dict[str, Any]:
    """``{"type": "error", "error": {type, message}}``."""
    other = "api_error" if problem.status >= 500 else "invalid_request_error"
    kind = ERROR_TYPES.get(problem.status, other)
    return {
        "type": "error",
        "error": {
            "type": kind,
            "message": problem.message,
            "code": problem.code,
            "param": problem.param,
        },
    }


def anthropic_usage(usage: Usage) -> dict[str, Any]:
    """Read, created and other input tokens add up to the prompt. Created are those up to the last
    mark that were not there."""
    created = _created(usage.cached, usage.holds)
    return {
        "input_tokens": usage.prompt - usage.cached - sum(created.values()),
        "cache_creation_input_tokens": sum(created.values()),
        "cache_read_input_tokens": usage.cached,
        "cache_creation": created,
        "output_tokens": usage.generated,
        "service_tier": "standard",
        "kvdb": usage.kvdb,
    }


def _created(cached: int, holds: Sequence[Hold]) -> dict[str, int]:
    created = {f"ephemeral_{ttl}_input_tokens": 0 for ttl in TTL_SECONDS}
    names = {seconds: f"ephemeral_{ttl}_input_tokens" for ttl, seconds in TTL_SECONDS.items()}
    at = cached
    for hold in sorted(holds, key=lambda hold: hold.tokens):
        if hold.tokens > at:
            created[names[hold.ttl_seconds]] += hold.tokens - at
            at = hold.tokens
    return created


class MessageWriter:
    """One message: each piece is added to it, and gives the events of a stream."""

    def __init__(self, turn: Turn, model: str) -> None:
        self._turn = turn
        self._model = model
        self._content: list[dict[str, Any]] = []
        self._open = False  # the last block may grow
        self._arguments = ""  # of the last block, if it is a call
        self._stop: dict[str, str | None] = {"stop_reason": None, "stop_sequence": None}

    def start(self) -> bytes:
        prompt = self._turn.prompt or Progress(0, 0)
        known = anthropic_usage(Usage(prompt.total, prompt.done, 0, {}))
        # What is not known yet comes with message_delta, which has the last word.
        del known["cache_creation"], known["kvdb"]
        event = {"type": "message_start", "message": self._message(known)}
        return frame(event, "message_start") + PING

    def piece(self, piece: Piece) -> bytes:
        if isinstance(piece, Text):
            before = self._block("text", {"type": "text", "text": ""})
            self._content[-1]["text"] += piece.text
            return before + self._delta({"type": "text_delta", "text": piece.text})
        if isinstance(piece, Reasoning):
            empty = {"type": "thinking", "thinking": "", "signature": ""}
            before = self._block("thinking", empty)
            self._content[-1]["thinking"] += piece.text
            return before + self._delta({"type": "thinking_delta", "thinking": piece.text})
        if isinstance(piece, CallStart):
            call = {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}}
            return self._close() + self._block("tool_use", call)
        if isinstance(piece, CallArguments):
            self._arguments += piece.text
            return self._delta({"type": "input_json_delta", "partial_json": piece.text})
        if isinstance(piece, Ended):
            reason = STOP_REASONS.get(piece.reason, "max_tokens")
            if piece.stop_text is not None:
                reason = "stop_sequence"
            self._stop = {"stop_reason": reason, "stop_sequence": piece.stop_text}
            return self._close()
        return b""

    def end(self, usage: Usage) -> bytes:
        delta = {"type": "message_delta", "delta": self._stop, "usage": anthropic_usage(usage)}
        return frame(delta, "message_delta") + frame({"type": "message_stop"}, "message_stop")

    def error(self, problem: Problem) -> bytes:
        return frame(anthropic_error(problem), "error")

    def whole(self, usage: Usage) -> Mapping[str, Any]:
        """The message, once it has ended."""
        return self._message(anthropic_usage(usage))

    def _message(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "id": f"msg_{self._turn.id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": self._content,
            **self._stop,
            "usage": usage,
        }

    def _block(self, kind: str, empty: dict[str, Any]) -> bytes:
        """Be in a block of a kind."""
        if self._open and self._content[-1]["type"] == kind:
            return b""
        before = self._close()
        self._content.append(dict(empty))
        self._open = True
        index = len(self._content) - 1
        event = {"type": "content_block_start", "index": index, "content_block": empty}
        return before + frame(event, "content_block_start")

    def _delta(self, delta: Mapping[str, str]) -> bytes:
        event = {"type": "content_block_delta", "index": len(self._content) - 1, "delta": delta}
        return frame(event, "content_block_delta")

    def _close(self) -> bytes:
        if not self._open:
            return b""
        self._open = False
        block, before = self._content[-1], b""
        if block["type"] == "thinking":
            block["signature"] = _signature(block["thinking"])
            before = self._delta({"type": "signature_delta", "signature": block["signature"]})
        elif block["type"] == "tool_use":
            with contextlib.suppress(ValueError):  # cut short: there is no object
                block["input"] = json.loads(self._arguments)
            self._arguments = ""
        index = len(self._content) - 1
        return before + frame({"type": "content_block_stop", "index": index}, "content_block_stop")


def _signature(thinking: str) -> str:
    """Clients send it back with the text, and take none that is empty."""
    digest = hashlib.sha256(thinking.encode("utf-8", "surrogatepass")).digest()
    return base64.b64encode(digest).decode()
