"""Plain completions through the official client."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.http.conftest import Running

PROMPT = "The quick brown fox jumps over the lazy dog and reads"


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"prompt": [PROMPT, "The weather of the city"], "n": 2, "temperature": 0.8, "seed": 3},
        {"prompt": [40, 41, 42, 43]},
        {"echo": True},
        {"prompt": [[40, 41, 42], [50, 51]], "echo": True},
        {"logprobs": 2},
    ],
    ids=lambda more: "-".join(more) or "plain",
)
def test_a_stream_says_what_a_whole_answer_says(server: Running, more: dict[str, Any]) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, **more}
    create = server.client.completions.create
    whole = create(**body)
    answers: dict[int, dict[str, Any]] = {}
    for chunk in create(stream=True, stream_options={"include_usage": True}, **body):
        usage = chunk.usage
        for choice in chunk.choices:
            answer = answers.setdefault(choice.index, {"text": "", "offsets": []})
            answer["text"] += choice.text
            answer["end"] = choice.finish_reason
            answer["offsets"] += choice.logprobs.text_offset if choice.logprobs else []
    assert [answers[choice.index]["text"] for choice in whole.choices] == [
        choice.text for choice in whole.choices
    ]
    assert [choice.index for choice in whole.choices] == sorted(answers)
    assert {answer["end"] for answer in answers.values()} == {"length"}
    assert usage.completion_tokens == whole.usage.completion_tokens == 8 * len(answers)
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    for choice in whole.choices:
        if choice.logprobs:
            assert choice.logprobs.text_offset == answers[choice.index]["offsets"]
            assert len(choice.logprobs.tokens) == len(choice.logprobs.top_logprobs) == 8
    if body.get("echo") and isinstance(body["prompt"], str):
        assert whole.choices[0].text.startswith(PROMPT)


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"prompt": ""}, "empty"),
        ({"prompt": []}, "empty"),
        ({"prompt": [""]}, "empty"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [-1]}, "tokens"),
        ({"prompt": [10**6]}, "vocabulary"),
        ({"prompt": [1 << 70]}, "tokens"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "logprobs": -1}, "logprobs"),
        ({"prompt": "a", "echo": True, "logprobs": 1}, "echo"),
        ({"prompt": ["a"] * 100}, "prompts"),
    ],
)
def test_what_is_wrong_is_said(server: Running, body: dict[str, Any], word: str) -> None:
    with pytest.raises(openai.BadRequestError, match=word):
        server.client.completions.create(model="tiny", **body)
    assert server.service.running() == []
