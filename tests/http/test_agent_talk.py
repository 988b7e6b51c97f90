"""A conversation as agents lead it, through ``kvdb serve``: it hits, also after a kill.

Twelve turns with tools, reasoning and a long system prompt; the server is killed in the midst of
the sixth. What each turn could reuse is counted on the token ids that were sent to the model.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from chat_model import tool, write_chat_model

import kvdb
from engine.prompt.tokenizer import load_tokenizer
from tests.http.conftest import BLOCK_TOKENS, TOOL_TEMPLATE
from tests.http.scripts import END
from tests.http.test_lifecycle import Program, serve

# As Qwen's templates do it: reasoning is written again until the next question, and a call that
# nothing was said before begins the answer.
TEMPLATE = TOOL_TEMPLATE.replace(
    "message.role + '\\n' + content",
    "message.role + '\\n' + ('<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n'"
    " if message.reasoning_content and loop.index0 > ns.last else '') + content",
).replace("'\\n<tool_call>\\n'", "('\\n' if content or not loop.first else '') + '<tool_call>\\n'")
assert "reasoning_content" in TEMPLATE
assert "not loop.first else" in TEMPLATE

KILLED_IN = 6
SYSTEM = "".join(
    f"{number}. Answer in short sentences about files and cities; look things up, then say so.\n"
    for number in range(28)
)
TOOLS = [tool("search"), tool("read_file", path="Which file")]
RESULT = "The weather of the city is 22 degrees. The quick brown fox reads the files. " * 3


def call(name: str, **arguments: str) -> str:
    given = json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": "{name}", "arguments": {given}}}\n</tool_call>'


def thought(text: str) -> str:
    return f"<think>\n{text}\n</think>\n\n"


SEARCH = call("search", query="été in Paris", limit="3")
READ = call("read_file", path="src/main.py")
# What the model says in each turn: an answer without a call is followed by a new question.
ANSWERS = [
    thought("The user wants the weather. I search.") + SEARCH,
    thought("Now the file.") + f"Let me look.\n{READ}",
    f"{SEARCH}\n{READ}",
    "It is warm, and the file is short.",
    thought("Another question: I read again.") + READ,
    thought("Hm. " * 60) + SEARCH,
    READ,
    "The file says: Fünf Füchse 🦊 read.",
    thought("Once more.") + SEARCH,
    READ,
    f"I see.\n{SEARCH}",
    "That is all.",
]
assert len(ANSWERS) == 12

# In the README too.
HITS = """
SELECT id, prompt_tokens AS prompt, matched_tokens AS known, restored_tokens AS restored,
       round(100.0 * restored_tokens / matched_tokens, 1) AS hit_percent,
       lag(prompt_tokens + generated_tokens) OVER (ORDER BY id) AS said_before
FROM requests ORDER BY id
"""


class Chat:
    """As OpenAI's clients lead it."""

    def __init__(self) -> None:
        self.messages: list[Any] = [{"role": "system", "content": SYSTEM}]

    def ask(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def _body(self) -> Any:
        return {"model": "tiny", "messages": self.messages, "tools": TOOLS, "max_tokens": 1000}

    @staticmethod
    def _client(url: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=url, api_key="none", max_retries=0)

    def turn(self, url: str) -> tuple[int, int, bool]:
        """Prompt and cached tokens, and whether tools were called; their results are at hand."""
        answer = self._client(url).chat.completions.create(**self._body())
        message, usage = answer.choices[0].message, answer.usage
        self.messages.append(message.model_dump(exclude_none=True))
        for used in message.tool_calls or ():
            result = {"role": "tool", "tool_call_id": used.id, "content": RESULT}
            self.messages.append(result)
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        cached = usage.prompt_tokens_details.cached_tokens or 0
        return usage.prompt_tokens, cached, bool(message.tool_calls)

    def begin(self, url: str) -> Iterator[Any]:
        return iter(self._client(url).chat.completions.create(stream=True, **self._body()))


class Messages:
    """As Anthropic's clients lead it."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def ask(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def _body(self) -> Any:
        tools = [
            {
                "name": each["function"]["name"],
                "description": each["function"]["description"],
                "input_schema": each["function"]["parameters"],
            }
            for each in TOOLS
        ]
        marked = {"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}
        given = {"model": "tiny", "messages": self.messages, "max_tokens": 1000}
        return {**given, "tools": tools, "system": [marked]}

    @staticmethod
    def _client(url: str) -> anthropic.Anthropic:
        url = url.removesuffix("/v1")
        return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)

    def turn(self, url: str) -> tuple[int, int, bool]:
        answer = self._client(url).messages.create(**self._body())
        said = [part.model_dump(exclude_none=True) for part in answer.content]
        self.messages.append({"role": "assistant", "content": said})
        results = [
            {"type": "tool_result", "tool_use_id": part["id"], "content": RESULT}
            for part in said
            if part["type"] == "tool_use"
        ]
        if results:
            self.messages.append({"role": "user", "content": results})
        usage = answer.usage
        cached, made = usage.cache_read_input_tokens or 0, usage.cache_creation_input_tokens or 0
        return usage.input_tokens + cached + made, cached, bool(results)

    def begin(self, url: str) -> Iterator[Any]:
        return iter(self._client(url).messages.create(stream=True, **self._body()))


@contextmanager
def scripted(home: Path) -> Iterator[Program]:
    program = Path(__file__).with_name("scripted_serve.py")
    words = (str(program), str(home / "answers.json"), str(home / "ids"))
    with serve(home, program=words, PYTHONPATH=str(program.parents[2])) as server:
        yield server


def shared(a: list[int], b: list[int]) -> int:
    """How many tokens two lists begin with alike."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((at for at, (x, y) in pairs if x != y), min(len(a), len(b)))


@pytest.mark.parametrize("dialect", [Chat, Messages])
def test_a_conversation_hits_from_its_second_turn_on_and_after_a_kill(
    tmp_path: Path, dialect: type[Chat | Messages]
) -> None:
    model = write_chat_model(tmp_path / "model", template=TEMPLATE)
    (tmp_path / "answers.json").write_text(json.dumps({"model": str(model), "answers": ANSWERS}))
    (tmp_path / "kvdb.toml").write_text(
        f"block_tokens = {BLOCK_TOKENS}\nmin_free_bytes = 0\n"
        f'[models."{model}"]\naliases = ["tiny"]\n'
    )
    talk, told, ids = dialect(), [], tmp_path / "ids"

    def lead(server: Program, until: int) -> None:
        while len(told) < until:
            if not told or not told[-1][2]:
                talk.ask(f"Question {len(told)}: what is the weather of the city of Paris?")
            told.append(talk.turn(server.url))

    with scripted(tmp_path) as server:
        lead(server, KILLED_IN - 1)
        said = talk.begin(server.url)
        for _ in range(20):  # then it is in the midst of its reasoning
            next(said)
        server.end(signal.SIGKILL)
    with scripted(tmp_path) as server:
        lead(server, len(ANSWERS))
        assert server.end(signal.SIGTERM) == 0

    prompts = [json.loads(line) for line in ids.read_text().splitlines()]
    del prompts[KILLED_IN - 1]  # asked again
    tokenizer = load_tokenizer(model)
    before: list[list[int]] = []
    with kvdb.open(tmp_path / "store") as store:
        rows = store.sql(HITS).rows
        assert not store.verify().problems
    assert len(prompts) == len(rows) == len(told) == 12
    for turn, (prompt, row, usage) in enumerate(zip(prompts, rows, told, strict=True), 1):
        _, tokens, known, restored, percent, said_before = row
        assert (tokens, restored) == usage[:2]
        assert tokens == len(prompt) > 1000
        longest = max((shared(prompt, each) for each in before), default=0)
        if turn > 1:
            assert restored >= 0.95 * longest, (turn, row, longest)
            # The query says the same: what is known are the tokens that were sent before.
            assert percent >= 95
            assert known >= 0.95 * longest
            assert known <= longest or turn == KILLED_IN
            assert said_before >= known or turn == KILLED_IN
            if "tool_call" in ANSWERS[turn - 2]:  # it goes on behind all that was said
                assert longest == said_before, (turn, longest, row)
        answer = tokenizer.encode(ANSWERS[turn - 1] + END, special=False).ids
        before.append([*prompt, *answer])
