"""Pairs of real requests through the real engine, and why the second one did not hit.

What is expected is computed another way: token ids by transformers' own chat template, the first
difference by comparing them, the tokens that hit from what the engine restored.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from chat_model import TEMPLATE, tool, write_chat_model
from many import settle
from tiny_model import write_adapter

import kvdb
from engine import Engine, Progress, Request, Token
from engine.prompt.encode import encode
from engine.prompt.tokenizer import load_tokenizer
from kvdb.clock import Environment
from kvdb.explain import Explanation, explain_request, explain_tokens
from kvdb.history import RequestRecord
from kvdb.opening import Options, open_store
from kvdb.shards import shard_path
from kvdb.store import Store

BLOCK = 32
TOOLS = [tool("search"), tool("weather", city="A city"), tool("read_file", path="A path")]
SYSTEM = (
    "You are a helpful assistant. Today is Monday, 2026-11-30 10:22:01, session 3f2a9c81-77b0. "
    'Answer in short sentences about files and cities. State: {"city": "Paris", "files": 3}. '
    "The quick brown fox jumps over the lazy dog and reads the weather of the city of Paris."
)
QUESTION = "What is the weather in Paris? Say it in one short sentence, for a helpful answer."


def system(text: str = SYSTEM) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: str = QUESTION) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def reversed_keys(given: dict[str, Any]) -> dict[str, Any]:
    return {
        key: reversed_keys(value) if isinstance(value, dict) else value
        for key, value in reversed(given.items())
    }


@cache
def independent(model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def ids(model: Path, messages: Sequence[Any], tools: Any = None, **options: Any) -> list[int]:
    """Token ids as transformers and mlx-lm have them: the vocabulary has <think>."""
    given: list[int] = independent(model).apply_chat_template(
        list(messages),
        tools=tools,
        add_generation_prompt=True,
        return_dict=False,
        enable_thinking=True,
        **options,
    )
    return given


def first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("models") / "chat")


@dataclass
class Bench:
    """An engine with a store, and what its last request gave."""

    store: Store
    engine: Engine
    model: Path
    restored: int = 0
    generated: tuple[int, ...] = ()

    def ask(self, messages: Sequence[Any], tools: Any = None, **request: Any) -> int:
        """Run a request to its end; returns its row id."""
        given = {"max_tokens": 4, **request}
        events = list(self.engine.generate(Request(messages=messages, tools=tools, **given)))
        self.store.flush()
        self.restored = events[-1].stats.restored_tokens
        self.generated = tuple(event.id for event in events if isinstance(event, Token))
        return int(self.store.sql("SELECT max(id) FROM requests").rows[0][0])

    def would(self, messages: Sequence[Any], tools: Any = None, **options: Any) -> Explanation:
        """What a request would hit, explained without running it."""
        tokenizer = load_tokenizer(self.model)
        request = Request(messages=messages, tools=tools, template_options=options)
        prompt = encode(request, tokenizer, None, None)
        namespace = self.store.namespaces()[-1]
        return explain_tokens(
            self.store,
            namespace,
            prompt.tokens,
            segments=prompt.segments(),
            text=tokenizer.decode,
        )

    def why(self, request_id: int) -> Explanation:
        return explain_request(self.store, request_id, load_tokenizer(self.model).decode)


Make = Callable[..., Bench]


@pytest.fixture
def bench(chat_model: Path, store: Store, make_engine: Any) -> Make:
    def make(model: Path = chat_model, block_tokens: int = BLOCK, **options: Any) -> Bench:
        return Bench(store, make_engine(store, model, block_tokens=block_tokens, **options), model)

    return make


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


def decoded(model: Path, tokens: Sequence[int]) -> str:
    return str(independent(model).decode(tokens, clean_up_tokenization_spaces=False))


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


# -- other namespaces ----------------------------------------------------------------------------


def test_another_model_has_it(tmp_path: Path, bench: Make) -> None:
    bench().ask([system(), user()])
    other = bench(write_chat_model(tmp_path / "other", seed=1))
    request = other.ask([system(), user()])
    check_elsewhere(other, request, "other_model")


def test_another_adapter_has_it(tmp_path: Path, bench: Make) -> None:
    bench().ask([system(), user()])
    other = bench(adapter=write_adapter(tmp_path / "adapter", seed=3))
    check_elsewhere(other, other.ask([system(), user()]), "other_adapter")


def test_other_kv_bits_have_it(bench: Make) -> None:
    bench(kv_bits=8, kv_group_size=32).ask([system(), user()])
    other = bench()
    request = other.ask([system(), user()])
    assert "8-bit KV in groups of 32" in check_elsewhere(other, request, "other_kv_bits").diagnosis


def test_another_block_size_has_it(bench: Make) -> None:
    bench(block_tokens=64).ask([system(), user()])
    other = bench()
    found = check_elsewhere(other, other.ask([system(), user()]), "other_block_size")
    assert "blocks of 64 tokens" in found.diagnosis


def check_elsewhere(made: Bench, request: int, code: str) -> Explanation:
    found = made.why(request)
    whole = len(ids(made.model, [system(), user()]))
    assert (found.code, found.hit_tokens, found.neighbour) == (code, 0, "namespace 1")
    # The other one holds the prompt and the answer's tail as one block: whole blocks are compared.
    assert whole - 64 < found.saving_tokens <= whole
    return found


# -- lost, and never stored ----------------------------------------------------------------------


def test_evicted_by_hand(bench: Make) -> None:
    made = bench()
    made.ask([system(), user()])
    made.store.evict(to_bytes=0)
    (when,) = made.store.sql("SELECT max(evicted_at) FROM evictions").rows[0]
    before = made.would([system(), user()])
    found = made.why(made.ask([system(), user()]))
    for one in (before, found):
        assert (one.code, one.differing_token, one.hit_tokens) == ("evicted", 0, 0)
        assert one.diagnosis.endswith(" UTC by hand.")
        assert "more room" not in one.advice
        assert iso(when) in one.diagnosis
        whole = len(ids(made.model, [system(), user()]))
        assert whole - BLOCK < one.saving_tokens <= whole


def iso(us: int) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(us / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S")


@pytest.fixture
def small(tmp_path: Path, make_engine: Any) -> Iterator[Callable[[int], Bench]]:
    """A store of 16 MiB with a model that fills it in 2,000 tokens."""
    model = write_chat_model(tmp_path / "wide", num_hidden_layers=16, num_key_value_heads=2)
    with kvdb.open(tmp_path / "small", max_bytes=16 << 20, min_free_bytes=0) as store:
        engines = []

        def make(block_tokens: int) -> Bench:
            engines.append(make_engine(store, model, block_tokens=block_tokens))
            return Bench(store, engines[-1], model)

        yield make
        for engine in engines:
            engine.close()


def test_evicted_by_the_limit(small: Callable[[int], Bench]) -> None:
    made = small(BLOCK)
    made.ask([system(), user()])
    for n in range(8):
        made.ask([system(f"{n} other words " * 60), user(f"{n}")], max_tokens=1)
    found = made.would([system(), user()])
    assert found.code == "evicted"
    assert "the store was full" in found.diagnosis
    with made.store.database.write() as connection:
        connection.execute("DELETE FROM evictions")
    found = made.would([system(), user()])
    assert found.diagnosis.endswith("some time ago; why is no longer known.")


def test_a_pin_that_expired(tmp_path: Path, chat_model: Path, make_engine: Any) -> None:
    clock = [1_800_000_000_000_000]
    environment = Environment(now_us=lambda: clock[0])
    options = Options(min_free_bytes=0)
    with open_store(tmp_path / "pinned", options, environment=environment) as store:
        made = Bench(store, make_engine(store, chat_model, block_tokens=BLOCK), chat_model)
        made.ask([system(), user()])
        (tip,) = store.sql("SELECT hash FROM blocks ORDER BY depth DESC LIMIT 1").rows[0]
        store.sequence(store.namespaces()[0], tip, name="agent", ttl_seconds=60)
        store.evict(to_bytes=0)
        assert made.would([system(), user()]).code == "hit"
        clock[0] += 61_000_000
        store.evict(to_bytes=0)
        found = made.would([system(), user()])
        assert found.code == "expired"
        assert "held until agent expired" in found.diagnosis
        made.engine.close()


def test_damage(bench: Make) -> None:
    made = bench()
    made.ask([system(), user()])
    (uuid, offset) = made.store.sql(
        "SELECT s.uuid, p.offset FROM parts AS p JOIN shards AS s ON s.id = p.shard_id "
        "JOIN blocks AS b ON b.id = p.block_id WHERE b.depth = 1 AND part = 'kv:0'"
    ).rows[0]
    path = shard_path(made.store.path, uuid)
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    start = int.from_bytes(data[:8], "little") + 8
    data[start + offset + 5] ^= 0xFF
    path.write_bytes(data)
    request = made.ask([system(), user()])
    found = made.why(request)
    assert (found.code, found.differing_token) == ("damaged", BLOCK)
    assert found.hit_tokens == made.restored


def test_never_stored_because_it_was_asked_so(bench: Make) -> None:
    made = bench()
    made.ask([system(), user()], store=False)
    check_unstored(made, "store=False", len(ids(made.model, [system(), user()])))


def test_never_stored_because_it_is_too_large(small: Callable[[int], Bench]) -> None:
    made = small(1024)
    long = [system(SYSTEM * 7), user()]
    made.ask(long)
    check_unstored(made, "larger than the store takes", len(ids(made.model, long)), long)


def test_never_stored_because_it_was_cancelled(bench: Make) -> None:
    made = bench()
    long = [system(SYSTEM * 30), user()]
    events = made.engine.generate(Request(messages=long, max_tokens=4))
    for event in events:
        if isinstance(event, Progress) and event.done >= 512:
            break
    events.close()  # type: ignore[attr-defined]
    settle(made.engine)
    found = check_unstored(made, "cancelled", len(ids(made.model, long)), long)
    assert found.hit_tokens >= 512


def check_unstored(
    made: Bench, why: str, whole: int, messages: Sequence[Any] = (system(), user())
) -> Explanation:
    before = made.would(messages)
    found = made.why(made.ask(messages, store=True))
    for one in (before, found):
        if one.code == "tokens_gone":  # it could not be stored this time either
            continue
        assert one.code == "not_stored"
        assert f"Request 1 began with the same {whole} tokens" in one.diagnosis
        assert why in one.diagnosis
        assert one.saving_tokens == whole - one.hit_tokens
    return before


def test_nothing_to_explain(bench: Make) -> None:
    made = bench()
    first = made.why(made.ask([system(), user()]))
    assert (first.code, first.hit_tokens, first.differing_token) == ("empty_store", 0, None)
    again = made.why(made.ask([system(), user()]))
    assert (again.code, again.hit_tokens) == ("hit", again.prompt_tokens)
    assert made.would([system(), user()]).code == "hit"


def test_a_request_whose_tokens_are_gone(bench: Make) -> None:
    made = bench()
    made.ask([system(), user()])
    request = made.ask([system(), user("Another question?")])
    made.store.evict(to_bytes=0)
    found = made.why(request)
    assert found.code == "tokens_gone"
    assert "parted from what was stored" in found.diagnosis
    assert found.where == "message 2 (user)"
    assert found.hit_tokens == made.restored
