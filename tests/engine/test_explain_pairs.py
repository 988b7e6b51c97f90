"""Pairs of real requests through the real engine, and why the second one did not hit.

What is expected is computed another way: token ids by transformers' own chat template, the first
difference by comparing them, the tokens that hit from what the engine restored.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from chat_model import TEMPLATE, tool, write_chat_model
from explain_bench import (
    BLOCK,
    SYSTEM,
    TOOLS,
    Make,
    assistant,
    decoded,
    first_difference,
    ids,
    reversed_keys,
    system,
    user,
)

from kvdb.history import RequestRecord


def thinking() -> list[dict[str, Any]]:
    return [
        system(),
        user(),
        assistant("<think>The city is Paris.</think>\n\nIt is sunny in the city of Paris today."),
    ]


TALK = [
    system(),
    user(),
    assistant("It is sunny in Paris."),
    user("And what is the weather in the city of Rome? Say it in one short sentence."),
    assistant("It rains in Rome, and the quick brown fox is wet."),
    user("Thank you. What about the files?"),
]
DATED = TEMPLATE.replace(
    "{%- set ns",
    "{{- '<|im_start|>system\\nDate: ' + (date or '-') + '<|im_end|>\\n' }}{%- set ns",
    1,
)


@dataclass(frozen=True)
class Pair:
    """Two requests, the cause of the second one's miss, and where it lies."""

    code: str
    where: str
    first: tuple[Sequence[Any], Any]
    second: tuple[Sequence[Any], Any]


PAIRS = {
    "tools in another order": Pair(
        "tools_reordered",
        "tool 1 of 3 (weather): name",
        ([system(), user()], TOOLS),
        ([system(), user()], [TOOLS[1], TOOLS[0], TOOLS[2]]),
    ),
    "tools where there were none": Pair(
        "tools_added",
        "system prompt",
        ([system(), user()], None),
        ([system(), user()], TOOLS),
    ),
    "one tool more, before others": Pair(
        "tools_added",
        "tool 2 of 3 (weather): name",
        ([system(), user()], [TOOLS[0], TOOLS[2]]),
        ([system(), user()], TOOLS),
    ),
    "the last tool left out": Pair(
        "tools_removed",
        "tool 3 of 3 (read_file) of the stored prompt",
        ([system(), user()], TOOLS),
        ([system(), user()], TOOLS[:2]),
    ),
    "a parameter of a tool described in another way": Pair(
        "tool_changed",
        "tool 2 of 3 (weather): parameters.properties.city.description",
        ([system(), user()], TOOLS),
        ([system(), user()], [TOOLS[0], tool("weather", city="A town"), TOOLS[2]]),
    ),
    "a tool's keys in another order": Pair(
        "keys_reordered",
        "tool 2 of 3 (weather)",
        ([system(), user()], TOOLS),
        ([system(), user()], [TOOLS[0], reversed_keys(TOOLS[1]), TOOLS[2]]),
    ),
    "keys of JSON in the system prompt in another order": Pair(
        "keys_reordered",
        "system prompt",
        ([system(), user()], None),
        (
            [
                system(
                    SYSTEM.replace('{"city": "Paris", "files": 3}', '{"files": 3, "city": "Paris"}')
                ),
                user(),
            ],
            None,
        ),
    ),
    "keys of a call's arguments in another order": Pair(
        "keys_reordered",
        "message 3 (assistant)",
        (
            [
                system(),
                user(),
                assistant(
                    "", tool_calls=[{"function": {"name": "weather", "city": "Paris", "day": "1"}}]
                ),
                user("Go on."),
            ],
            None,
        ),
        (
            [
                system(),
                user(),
                assistant(
                    "", tool_calls=[{"function": {"day": "1", "name": "weather", "city": "Paris"}}]
                ),
                user("Go on."),
            ],
            None,
        ),
    ),
    "another time in the system prompt": Pair(
        "timestamp",
        "system prompt",
        ([system(), user()], TOOLS),
        ([system(SYSTEM.replace("10:22:01", "11:05:59")), user()], TOOLS),
    ),
    "another session id in the system prompt": Pair(
        "unique_id",
        "system prompt",
        ([system(), user()], None),
        ([system(SYSTEM.replace("3f2a9c81-77b0", "91bb04de-11c2")), user()], None),
    ),
    "a line end more in an earlier message": Pair(
        "whitespace",
        "message 4 (user)",
        (TALK, None),
        ([*TALK[:3], user(TALK[3]["content"] + "\n"), *TALK[4:]], None),
    ),
    "reasoning that the template drops later": Pair(
        "rerendered",
        "message 3 (assistant)",
        ([*thinking(), {"role": "tool", "content": "sunny"}], None),
        (
            [
                *thinking(),
                {"role": "tool", "content": "sunny"},
                assistant("It is sunny."),
                user("And Rome?"),
            ],
            None,
        ),
    ),
    "the oldest messages left out": Pair(
        "messages_dropped",
        "message 2 (user)",
        (TALK, None),
        ([TALK[0], *TALK[3:]], None),
    ),
    "a message put in between": Pair(
        "messages_inserted",
        "message 4 (user)",
        (TALK, None),
        ([*TALK[:3], user("Wait a moment."), assistant("I wait."), *TALK[3:]], None),
    ),
    "an earlier message edited": Pair(
        "message_changed",
        "message 4 (user)",
        (TALK, None),
        ([*TALK[:3], user("And what is the time there? One sentence."), *TALK[4:]], None),
    ),
    "another system prompt": Pair(
        "system_changed",
        "system prompt",
        ([system(), user()], None),
        ([system("You are a helpful assistant. Speak like a pirate of the sea."), user()], None),
    ),
    "another last question": Pair(
        "new_content",
        "message 2 (user)",
        ([system(), user()], None),
        ([system(), user("What is the weather in Rome?")], None),
    ),
    "an answer that the model did not give": Pair(
        "answer_changed",
        "message 3 (assistant)",
        ([system(), user()], None),
        ([system(), user(), assistant("It is sunny."), user("Thanks.")], None),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_of_requests_is_explained(bench: Make, name: str) -> None:
    pair, made = PAIRS[name], bench()
    made.ask(*pair.first)
    stored = [*ids(made.model, *pair.first), *made.generated]
    prompt = ids(made.model, *pair.second)
    expected = first_difference(stored, prompt)
    before = made.would(*pair.second)
    request = made.ask(*pair.second)
    after = made.why(request)

    for found in (before, after):
        assert (found.code, found.where) == (pair.code, pair.where)
        assert found.differing_token == expected
        assert (found.prompt_tokens, found.hit_tokens) == (len(prompt), made.restored)
        assert found.neighbour == "request 1"
        assert found.diagnosis.endswith(".")
        assert marked(found.prompt_text) == decoded(made.model, prompt[expected : expected + 1])
        assert marked(found.stored_text) == decoded(made.model, stored[expected : expected + 1])
        assert 0 <= found.saving_tokens <= len(prompt) - expected
        if pair.code != "new_content":
            assert found.saving_tokens > 0 or len(prompt) - expected < 40
    assert after == replace(before, saving_seconds=after.saving_seconds)
    assert request == 2


def marked(text: str | None) -> str:
    assert text is not None
    return text.split("»")[1].split("«")[0]


@pytest.mark.parametrize(
    "tools", [[TOOLS[1], TOOLS[0], TOOLS[2]], [reversed_keys(tool) for tool in TOOLS]]
)
def test_what_a_reordering_costs(bench: Make, tools: list[Any]) -> None:
    """All but the front would have hit: what is saved is what was computed once too often."""
    made = bench()
    made.ask([system(), user()], TOOLS)
    request = made.ask([system(), user()], tools)
    found = made.why(request)
    computed = found.prompt_tokens - found.hit_tokens
    assert 0.9 * computed <= found.saving_tokens <= computed
    assert found.saving_seconds is not None
    assert found.saving_seconds > 0


def test_a_long_prompt_is_not_its_own_neighbour(bench: Make) -> None:
    """Its first blocks are stored while it is still computed."""
    made = bench(step=BLOCK)
    made.ask([system(SYSTEM * 6), user()])
    request = made.ask([system(SYSTEM.replace("10:22", "11:07") + SYSTEM * 5), user()])
    found = made.why(request)
    assert (found.code, found.where) == ("timestamp", "system prompt")
    assert found.neighbour == "request 1"
    assert found.hit_tokens == made.restored <= (found.differing_token or 0)


def test_a_neighbour_that_no_recent_request_is(bench: Make) -> None:
    """Its parts are found by the chain that it ended in."""
    made = bench()
    made.ask([system(), user()], TOOLS)
    for n in range(70):
        row = RequestRecord(
            time.time_ns() // 1000, made.store.namespaces()[0].id, *(1, 0, 0, 1, n), "none"
        )
        made.store.record(row)
    made.store.flush()
    found = made.would([system(), user()], [TOOLS[1], TOOLS[0], TOOLS[2]])
    assert (found.code, found.neighbour) == ("tools_reordered", "request 1")
    with made.store.database.write() as connection:
        connection.execute("DELETE FROM requests")
    found = made.would([system(), user()], [TOOLS[1], TOOLS[0], TOOLS[2]])
    at = first_difference(
        ids(made.model, [system(), user()], TOOLS),
        ids(made.model, [system(), user()], [TOOLS[1], TOOLS[0], TOOLS[2]]),
    )
    assert (found.code, found.differing_token) == ("text_changed", at)
    assert str(found.neighbour).startswith("block ")


def test_an_answer_sent_back_as_other_tokens(bench: Make) -> None:
    """The text of a random answer, tokenized anew, is not the ids that were generated."""
    made = bench()
    talk = [system(), user()]
    for seed in range(8):
        from engine import Sampling

        made.ask(
            talk, max_tokens=12, sampling=Sampling(temperature=3.0, seed=seed), ignore_eos=True
        )
        answer = [token for token in made.generated if token > 3]
        text = decoded(made.model, answer)
        stored = [*ids(made.model, talk), *made.generated]
        prompt = ids(made.model, [*talk, assistant(text), user("Go on.")])
        at = first_difference(stored, prompt)
        if "\ufffd" not in text and tuple(answer) == made.generated and at < len(stored):
            break
    else:
        pytest.fail("no seed gave an answer that is tokenized in another way")
    found = made.would([*talk, assistant(text), user("Go on.")])
    assert (found.code, found.where) == ("retokenized", "message 3 (assistant)")
    assert found.differing_token == at


def test_a_date_that_the_template_writes(tmp_path: Path, bench: Make) -> None:
    model = write_chat_model(tmp_path / "dated", template=DATED)
    made = bench(model)
    made.ask([user()], template_options={"date": "2026-11-30"})
    request = made.ask([user()], template_options={"date": "2026-12-01"})
    found = made.why(request)
    assert (found.code, found.where) == ("timestamp", "text of the chat template")
    stored = ids(model, [user()], date="2026-11-30")
    assert found.differing_token == first_difference(
        stored, ids(model, [user()], date="2026-12-01")
    )
