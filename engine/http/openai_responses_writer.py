"""A response of OpenAI's as it grows, whole or as the events of a stream."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from engine.http.errors import Problem
from engine.http.openai_responses_tools import Called
from engine.http.openai_shapes import chat_logprobs
from engine.http.sse import frame
from engine.http.turn import CallArguments, CallStart, Chosen, Ended, Piece, Reasoning, Text
from engine.http.usage import Usage
from engine.prompt.responses import seal

SHORT = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "custom_tool_call": "ctc",
}
IN_PROGRESS, COMPLETED, INCOMPLETE = "in_progress", "completed", "incomplete"


class ResponseWriter:
    """One response: each piece is added to its output, and gives the events of a stream. ``head``
    are the fields that do not change, ``called`` the client's names of tools. ``reasoning_tokens``
    counts those of a text; ``sealed``: reasoning is also given as the opaque text that clients send
    back."""

    def __init__(
        self,
        head: Mapping[str, Any],
        called: Mapping[str, Called],
        reasoning_tokens: Callable[[str], int],
        *,
        sealed: bool = False,
    ) -> None:
        self._head = dict(head)
        self._name = str(head["id"]).removeprefix("resp_")
        self._called = called
        self._count = reasoning_tokens
        self._sealed = sealed
        self._output: list[dict[str, Any]] = []
        self._open = False  # the last item may grow
        self._arguments = ""  # of the last item, if it is a call
        self._numbers = 0
        self._status = IN_PROGRESS
        self._usage: Usage | None = None
        self._error: dict[str, str] | None = None

    @property
    def failed(self) -> bool:
        return self._error is not None

    def start(self) -> bytes:
        return self._told("response.created") + self._told("response.in_progress")

    def piece(self, piece: Piece) -> bytes:
        if isinstance(piece, Text):
            empty = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            before = self._texts("message", empty, role="assistant")
            self._part["text"] += piece.text
            return before + self._delta("response.output_text", piece.text, logprobs=[])
        if isinstance(piece, Reasoning):
            before = self._texts("reasoning", {"type": "reasoning_text", "text": ""}, summary=[])
            self._part["text"] += piece.text
            return before + self._delta("response.reasoning_text", piece.text)
        if isinstance(piece, CallStart):
            return self._close() + self._start_call(piece)
        if isinstance(piece, CallArguments):
            self._arguments += piece.text
            if self._output[-1]["type"] == "custom_tool_call":
                return b""  # its text is in them as JSON
            self._output[-1]["arguments"] = self._arguments
            return self._told_of_item("response.function_call_arguments.delta", delta=piece.text)
        if isinstance(piece, Chosen) and self._open and self._output[-1]["type"] == "message":
            self._part["logprobs"] += chat_logprobs([piece])
        if isinstance(piece, Ended):
            whole = piece.reason in ("stop", "tool_calls")
            self._status = COMPLETED if whole else INCOMPLETE
            return self._close(self._status)
        return b""

    def end(self, usage: Usage) -> bytes:
        """Nothing yet: the response is kept before its client hears that it is complete."""
        self._usage = usage
        return b""

    def last(self, response: Mapping[str, Any]) -> bytes:
        """The last event of a stream, with the response as it was kept."""
        return self._event(f"response.{response['status']}", response=response)

    def error(self, problem: Problem) -> bytes:
        self._status = "failed"
        self._error = {"code": problem.code, "message": problem.message}
        return self._told("response.failed")

    def response(self) -> dict[str, Any]:
        """The response as it is now."""
        cut = {"reason": "max_output_tokens"} if self._status == INCOMPLETE else None
        return {
            **self._head,
            "status": self._status,
            "error": self._error,
            "incomplete_details": cut,
            "output": [dict(item) for item in self._output],
            "usage": None if self._usage is None else self._told_usage(self._usage),
        }

    def _told_usage(self, usage: Usage) -> dict[str, Any]:
        thoughts = [
            part["text"]
            for item in self._output
            if item["type"] == "reasoning"
            for part in item["content"]
        ]
        return {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached},
            "output_tokens": usage.generated,
            "output_tokens_details": {"reasoning_tokens": sum(map(self._count, thoughts))},
            "total_tokens": usage.prompt + usage.generated,
            "kvdb": usage.kvdb,
        }

    @property
    def _part(self) -> dict[str, Any]:
        part: dict[str, Any] = self._output[-1]["content"][-1]
        return part

    def _texts(self, kind: str, empty: dict[str, Any], **more: Any) -> bytes:
        """Be in an item of a kind that holds text."""
        if self._open and self._output[-1]["type"] == kind:
            return b""
        before = self._close() + self._item(kind, {**more, "content": []})
        self._output[-1]["content"].append(dict(empty))
        return before + self._told_of_part("response.content_part.added", part=empty)

    def _start_call(self, start: CallStart) -> bytes:
        called = self._called.get(start.name, Called(start.name))
        call = {"call_id": start.id, "name": called.name}
        if called.namespace is not None:
            call["namespace"] = called.namespace
        self._arguments = ""
        if called.custom:
            return self._item("custom_tool_call", {**call, "input": ""})
        return self._item("function_call", {**call, "arguments": ""})

    def _item(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        id_ = f"{SHORT[kind]}_{self._name}_{len(self._output)}"
        self._output.append({"id": id_, "type": kind, "status": IN_PROGRESS, **fields})
        self._open = True
        return self._told_whole("response.output_item.added")

    def _close(self, status: str = COMPLETED) -> bytes:
        if not self._open:
            return b""
        self._open = False
        item = self._output[-1]
        item["status"] = status
        if item["type"] == "function_call":
            done = "response.function_call_arguments.done"
            told = self._told_of_item(done, name=item["name"], arguments=item["arguments"])
        elif item["type"] == "custom_tool_call":
            text = item["input"] = _text_in(self._arguments)
            told = self._told_of_item("response.custom_tool_call_input.delta", delta=text)
            told += self._told_of_item("response.custom_tool_call_input.done", input=text)
        else:
            part = self._part
            more = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            done = f"response.{part['type']}.done"
            told = self._told_of_part(done, text=part["text"], **more)
            told += self._told_of_part("response.content_part.done", part=part)
            if self._sealed and item["type"] == "reasoning":
                item["encrypted_content"] = seal(part["text"])
        return told + self._told_whole("response.output_item.done")

    def _delta(self, name: str, text: str, **more: Any) -> bytes:
        return self._told_of_part(f"{name}.delta", delta=text, **more)

    def _told_of_part(self, event: str, /, **fields: Any) -> bytes:
        return self._told_of_item(event, content_index=0, **fields)

    def _told_of_item(self, event: str, /, **fields: Any) -> bytes:
        index = len(self._output) - 1
        return self._event(event, item_id=self._output[-1]["id"], output_index=index, **fields)

    def _told_whole(self, name: str) -> bytes:
        return self._event(name, output_index=len(self._output) - 1, item=self._output[-1])

    def _told(self, name: str) -> bytes:
        return self._event(name, response=self.response())

    def _event(self, name: str, /, **fields: Any) -> bytes:
        event = {"type": name, "sequence_number": self._numbers, **fields}
        self._numbers += 1
        return frame(event, name)


def _text_in(arguments: str) -> str:
    """The text that a custom tool was called with; what is no such call is text as a whole."""
    try:
        given = json.loads(arguments)
    except ValueError:  # cut short
        return arguments
    text = given.get("input") if isinstance(given, dict) else None
    return text if isinstance(text, str) else arguments
