"""Chats through the official client: a stream says what a whole answer says."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.http.conftest import Running

LONG = "The quick brown fox jumps over the lazy dog. " * 8


def chat(text: str = LONG) -> list[dict[str, str]]:
    return [{"role": "system", "content": "You answer."}, {"role": "user", "content": text}]


def streamed(server: Running, **body: Any) -> tuple[list[dict[str, Any]], Any]:
    """The answers of a stream put together, and its usage."""
    answers: dict[int, dict[str, Any]] = {}
    usage = None
    stream = server.client.chat.completions.create(
        model="tiny", stream=True, stream_options={"include_usage": True}, **body
    )
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            answer = answers.setdefault(choice.index, {"text": "", "logprobs": [], "end": None})
            assert answer["end"] is None
            answer["text"] += choice.delta.content or ""
            answer["logprobs"] += choice.logprobs.content if choice.logprobs else []
            answer["end"] = choice.finish_reason
    return [answers[i] for i in sorted(answers)], usage


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"temperature": 0.9, "seed": 5, "top_p": 0.9},
        {"temperature": 0.9, "seed": 5, "n": 3},
        {"logprobs": True, "top_logprobs": 3},
        {"stop": ["gen", "or"]},
        {"max_completion_tokens": 3},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"logit_bias": {"40": 50}},
    ],
    ids=lambda more: "-".join(more) or "plain",
)
def test_a_stream_says_what_a_whole_answer_says(server: Running, more: dict[str, Any]) -> None:
    whole = server.client.chat.completions.create(model="tiny", messages=chat(), **more)
    parts, usage = streamed(server, messages=chat(), **more)
    assert [part["text"] for part in parts] == [c.message.content for c in whole.choices]
    assert [part["end"] for part in parts] == [c.finish_reason for c in whole.choices]
    assert whole.choices[0].message.content
    for part, choice in zip(parts, whole.choices, strict=True):
        expected = choice.logprobs.content if choice.logprobs else []
        assert [each.token for each in part["logprobs"]] == [each.token for each in expected]
    for found in (whole.usage, usage):
        assert found.total_tokens == found.prompt_tokens + found.completion_tokens
        assert 0 <= found.prompt_tokens_details.cached_tokens <= found.prompt_tokens
        assert found.completion_tokens == whole.usage.completion_tokens


def test_what_is_asked_for_holds(server: Running) -> None:
    create = server.client.chat.completions.create
    stopped = create(model="tiny", messages=chat(), max_tokens=24)
    text = stopped.choices[0].message.content
    assert stopped.choices[0].finish_reason == "length"
    assert stopped.usage is not None
    assert stopped.usage.completion_tokens == 24
    word = text[4:7]
    cut = create(model="tiny", messages=chat(), stop=word)
    assert cut.choices[0].message.content == text[: text.index(word)]
    assert cut.choices[0].finish_reason == "stop"
    biased = create(model="tiny", messages=chat(), logit_bias={"40": 100}, max_tokens=4)
    likely = (
        create(model="tiny", messages=chat(), logprobs=True, top_logprobs=2, max_tokens=2)
        .choices[0]
        .logprobs.content
    )
    assert len(set(biased.choices[0].message.content)) == 1
    assert [len(each.top_logprobs) for each in likely] == [2, 2]
    assert likely[0].token == likely[0].top_logprobs[0].token  # greedy
    said = b"".join(bytes(each.bytes) for each in likely).decode("utf-8", "ignore")
    assert text.startswith(said.lstrip())  # mlx-lm's detokenizer drops a space at the start


def test_usage_says_what_the_cache_did(server: Running) -> None:
    create = server.client.chat.completions.create
    messages = chat("What did the cache do? " * 20)
    usages = [create(model="tiny", messages=messages, max_tokens=2).usage for _ in range(2)]
    longer = [*messages[:1], {"role": "user", "content": messages[1]["content"] + "And then?"}]
    usages.append(create(model="tiny", messages=longer, max_tokens=2).usage)
    for usage in usages:
        told = usage.kvdb
        parts = ("restored", "refilled", "masked", "computed")
        assert sum(told[f"{part}_tokens"] for part in parts) == usage.prompt_tokens
        assert usage.prompt_tokens_details.cached_tokens == told["restored_tokens"]
    cold, hot, grown = (usage.kvdb for usage in usages)
    assert cold["diverged_at"]["message"] == "message 2 (user)"
    assert (hot["skip"], hot["computed_tokens"]) == ("full", 0)
    assert "diverged_at" not in hot
    assert grown["skip"] == "partial"
    # The end of a message, and the template's text behind it, are other tokens now.
    assert 0 < grown["diverged_at"]["token"] < usages[0].prompt_tokens
    assert grown["diverged_at"]["message"] == "message 2 (user)"


def test_load_warm_up_and_prefill_are_told_apart(start: Any) -> None:
    server = start()
    first, second = (
        server.client.chat.completions.create(model="tiny", messages=chat(text), max_tokens=1)
        for text in ("One " * 40, "Two " * 40)
    )
    ms = first.usage.kvdb["ms"]
    assert min(ms["load"], ms["warmup"], ms["prefill"]) > 0
    assert second.usage.kvdb["ms"]["load"] == 0
    assert second.usage.kvdb["ms"]["prefill"] > 0


def test_models_are_listed(server: Running) -> None:
    listed = list(server.client.models.list())
    assert [model.id for model in listed] == list(server.service.models)
    assert server.client.models.retrieve("tiny").id == listed[0].id
    with pytest.raises(openai.NotFoundError, match="not served"):
        server.client.models.retrieve("other")


IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}
USER = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"messages": []}, "empty"),
        ({"messages": "Hi"}, "messages"),
        ({}, "messages"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "image_url"),
        ({"messages": [{"role": "robot", "content": "Hi"}]}, "role"),
        ({"messages": [USER], "max_tokens": 0}, "max_tokens"),
        ({"messages": [USER], "max_tokens": "9"}, "max_tokens"),
        ({"messages": [USER], "n": 1000}, "n must"),
        ({"messages": [USER], "temperature": -1}, "temperature"),
        ({"messages": [USER], "top_logprobs": 3}, "logprobs"),
        ({"messages": [USER], "logit_bias": {"x": 1}}, "logit_bias"),
        ({"messages": [USER], "logit_bias": {"999999": 1}}, "logit_bias"),
        ({"messages": [USER], "stop": [""]}, "stop"),
        ({"messages": [USER] * 30}, "messages"),
        ({"messages": [USER], "kvdb": {"prio": 1}}, "kvdb.prio"),
        ({"messages": [USER], "kvdb": {"priority": "high"}}, "priority"),
        ({"messages": [{"role": "user", "content": "word " * 3000}]}, "context"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "text"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(
    limited: Running, body: dict[str, Any], word: str
) -> None:
    for stream in (False, True):
        answer = limited.post("/v1/chat/completions", {"model": "tiny", "stream": stream, **body})
        error = answer.json()["error"]
        assert answer.status_code == 400, error
        assert error["type"] == "invalid_request_error"
        assert word in error["message"]
        assert error["message"].endswith(".")
        assert "\n" not in error["message"]


@pytest.fixture(scope="module")
def limited(start: Any) -> Running:
    from engine.http.service import Limits

    return start(limits=Limits(max_messages=20, max_tokens=5))


def test_an_answer_is_cut_where_the_server_says(limited: Running) -> None:
    """Agents ask for 32,000 tokens whoever serves them."""
    for more in ({}, {"max_tokens": 32_000}):
        answer = limited.client.chat.completions.create(model="tiny", messages=chat(), **more)
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.completion_tokens == 5


def test_errors_have_openais_classes(limited: Running) -> None:
    with pytest.raises(openai.NotFoundError, match="not served"):
        limited.client.chat.completions.create(model="gpt-4", messages=chat())
    with pytest.raises(openai.BadRequestError, match="top_p"):
        limited.client.chat.completions.create(model="tiny", messages=chat(), top_p=2)
    for wrong in (b"", b"{", b"[]", b'"x"', b"\xff", b'{"messages": NaN}', b"[" * 5000):
        assert limited.post("/v1/chat/completions", wrong).status_code == 400
    assert limited.post("/nothing", {}).json()["error"]["code"] == "not_found"
