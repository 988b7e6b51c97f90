"""Answers that must be something: masks, processors, and the rows beside them in a batch."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from chat_model import _backend, tool, write_chat_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from many import ask_all, ids
from tiny_model import Run, difference, run, write_model
from tokenizers import Tokenizer

import kvdb
from engine import End, Engine, EngineOptions, Guide, Request, Sampling, Token
from engine.guide import grammar
from kvdb.errors import UsageError
from kvdb.store import Store

PROMPT = "The quick brown fox jumps over the lazy dog and reads the weather of the city of Paris."
POINT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 31}},
        "wet": {"type": "boolean"},
    },
    "required": ["city", "days", "wet"],
    "additionalProperties": False,
}
POINT["properties"]["days"]["maxItems"] = 3
WARM = {"temperature": 1.0}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with kvdb.open(tmp_path_factory.mktemp("guide") / "store", min_free_bytes=0) as opened:
        yield opened


@pytest.fixture(scope="module")
def engine(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    model = write_chat_model(tmp_path_factory.mktemp("guide") / "chat")
    with Engine(store, str(model), options=EngineOptions(16)) as made:
        yield made


def guided(engine: Engine, guide: Guide, seed: int = 1, **options: Any) -> Run:
    options = {"text": PROMPT, "max_tokens": 200, **options}
    return run(engine, None, guide=guide, sampling=Sampling(**WARM, seed=seed), **options)


def ends(engine: Engine, request: Request) -> tuple[dict[int, str], list[End]]:
    """The texts and ends of all answers to a request."""
    texts: dict[int, str] = {}
    found = []
    for event in engine.generate(request):
        if isinstance(event, Token | End):
            texts[event.index] = texts.get(event.index, "") + event.text
        if isinstance(event, End):
            found.append(event)
    return texts, found


@pytest.mark.parametrize("seed", range(4))
def test_an_answer_by_a_schema_is_valid(engine: Engine, seed: int) -> None:
    answer = guided(engine, Guide.schema(POINT), seed)
    jsonschema.validate(json.loads(answer.text), POINT)
    assert answer.end.reason == "stop"
    again = guided(engine, Guide.schema(POINT), seed)
    assert again.stats.skip == "full"  # the mask is on the first token too
    assert (again.text, again.ids) == (answer.text, answer.ids)
    # What is stored and observed are the model's own logits.
    assert difference(answer.logits[:1], run(engine, None, text=PROMPT).logits[:1]) <= 1e-5


def test_without_the_guide_it_is_no_json(engine: Engine) -> None:
    free = run(engine, None, text=PROMPT, max_tokens=60, sampling=Sampling(**WARM, seed=1))
    with pytest.raises(ValueError, match="Expecting"):
        json.loads(free.text)


LEAVES = st.sampled_from(
    [
        {"type": "boolean"},
        {"type": "null"},
        {"enum": ["red", "green", 3]},
        {"const": {"a": [1, None]}},
        {"type": "integer", "minimum": -3, "maximum": 120},
        {"type": "string", "maxLength": 4},
        {"type": "string", "pattern": "^[a-c]{1,3}$"},
    ]
)


def _larger(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.sampled_from(["a", "b", 'c"d', "\u00e9"])
    return st.one_of(
        st.builds(lambda item: {"type": "array", "items": item, "maxItems": 2}, inner),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(
            lambda fields: {
                "type": "object",
                "properties": fields,
                "required": sorted(fields)[:2],
                "additionalProperties": False,
            },
            st.dictionaries(names, inner, max_size=3),
        ),
    )


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(schema=st.recursive(LEAVES, _larger, max_leaves=5), seed=st.integers(0, 1 << 20))
def test_whatever_the_schema_the_answer_is_valid(
    engine: Engine, schema: dict[str, Any], seed: int
) -> None:
    answer = guided(engine, Guide.schema(schema), seed, max_tokens=400, store=False)
    assert answer.end.reason == "stop"
    jsonschema.validate(json.loads(answer.text), schema)


def test_expressions_grammars_and_tools(engine: Engine) -> None:
    pattern = r"[a-f]{3}-[0-9]{2,4}"
    assert re.fullmatch(pattern, guided(engine, Guide.regex(pattern)).text)
    lark = 'start: "yes" | "no" " " /[0-9]/'
    assert re.fullmatch(r"yes|no [0-9]", guided(engine, Guide.lark(lark)).text)
    tools = [
        {
            "type": "function",
            "function": {"name": name, "parameters": POINT},
        }
        for name in ("walk", "swim")
    ]
    text = guided(engine, Guide.tool_call(tools, "swim"), max_tokens=300).text
    assert (text[:12], text[-13:]) == ("<tool_call>\n", "\n</tool_call>")
    call = json.loads(text[12:-13])
    assert call["name"] == "swim"
    jsonschema.validate(call["arguments"], POINT)
    assert guided(engine, Guide.json(), max_tokens=40).text.startswith("{")


def test_a_special_token_of_a_call_is_that_token() -> None:
    text = grammar(Guide.tool_call([tool("search")]), {"<tool_call>": 7, "</tool_call>": 8})
    assert '<[7]> "\\n' in text
    assert '}\\n" <[8]>' in text


@pytest.mark.parametrize(
    ("guide", "match"),
    [
        (Guide.schema({"type": "objekt"}), "JSON schema cannot be followed: Invalid type"),
        (Guide.schema({"type": "string", "not": {"const": "a"}}), "Unimplemented keys"),
        (Guide.schema("[1]"), "JSON schema cannot be followed"),
        (Guide.schema('{"items":' * 300 + "true" + "}" * 300), "cannot be followed"),
        (Guide.regex("a("), "regular expression cannot be followed"),
        (Guide.lark("start: foo"), "grammar cannot be followed"),
    ],
)
def test_what_cannot_be_followed_is_one_sentence(engine: Engine, guide: Guide, match: str) -> None:
    for _ in range(2):
        with pytest.raises(UsageError, match=match) as error:
            guided(engine, guide)
        assert str(error.value).endswith(".")
        assert "\n" not in str(error.value)
    assert engine.load().running == 0


def test_a_description_that_says_nothing_is_refused() -> None:
    for make in (
        lambda: Guide.schema("{"),
        lambda: Guide.schema('{"items":' * 5000 + "true" + "}" * 5000),
        lambda: Guide.schema({"a": object()}),
        lambda: Guide.tool_call([]),
        lambda: Guide.tool_call([tool("search")], "find"),
        lambda: Guide.tool_call([{}]),
        lambda: Request(text="a", guide=Guide.json(), ignore_eos=True),
    ):
        with pytest.raises(UsageError):
            make()


@pytest.mark.parametrize("tokenizer", [False, True])
def test_a_model_whose_tokenizer_will_not_do_says_so(tmp_path: Path, tokenizer: bool) -> None:
    model = write_model(tmp_path / "bare", tokenizer=tokenizer)  # of words: llguidance has none
    with Engine(None, str(model)) as bare, pytest.raises(UsageError, match="tokenizer"):
        run(bare, [1, 2, 3], guide=Guide.json())


def test_answers_to_one_prompt_are_each_guided(engine: Engine) -> None:
    request = Request(
        text=PROMPT,
        n=3,
        max_tokens=200,
        guide=Guide.schema(POINT),
        sampling=Sampling(**WARM, seed=5),
        logprobs=3,
    )
    texts, found = ends(engine, request)
    assert {end.reason for end in found} == {"stop"}
    assert len(set(texts.values())) > 1
    for text in texts.values():
        jsonschema.validate(json.loads(text), POINT)
    assert ends(engine, request)[0] == texts


def test_rows_beside_a_guided_one_are_as_alone(engine: Engine) -> None:
    """Three requests decode together, one of them guided and one with a script."""
    free, alone = Watch(), Watch()
    script = Script(b"Paris, of course.")

    def unguided(watch: Watch) -> Request:
        return Request(
            text="So: " + PROMPT, max_tokens=80, ignore_eos=True, processors=(lambda: watch,)
        )

    single = list(engine.generate(unguided(alone)))
    schema = Guide.schema(POINT)
    every = ask_all(
        engine,
        [
            unguided(free),
            Request(text="But: " + PROMPT, guide=schema, sampling=Sampling(**WARM, seed=3)),
            Request(text="Now: " + PROMPT, max_tokens=17, processors=(lambda: script,)),
        ],
    )
    found = [own[-1] for own in every]
    assert all(isinstance(end, End) and end.stats.shared_steps for end in found)
    assert ids(every[0]) == ids(single)
    assert difference(np.stack(alone.logits), np.stack(free.logits)) <= 1e-4
    texts = ["".join(e.text for e in own if isinstance(e, Token | End)) for own in every]
    jsonschema.validate(json.loads(texts[1]), POINT)
    assert texts[2] == "Paris, of course."


class Watch:
    """Keeps the logits it is given, and leaves them."""

    def __init__(self) -> None:
        self.logits: list[Any] = []

    def __call__(self, tokens: Sequence[int], logits: Any) -> Any:
        self.logits.append(np.array(logits))
        assert len(tokens) == len(self.logits) - 1
        return logits


class Script:
    """Forces bytes, one token each; remembers how long the answer was each time."""

    def __init__(self, text: bytes) -> None:
        self.text = text
        self.lengths: list[int] = []

    def __call__(self, tokens: Sequence[int], logits: Any) -> Any:
        import mlx.core as mx

        self.lengths.append(len(tokens))
        forced = np.full((1, logits.shape[1]), -np.inf, np.float32)
        forced[0, letters(self.text)[min(len(tokens), len(self.text) - 1)]] = 0
        return mx.array(forced)


@cache
def letters(text: bytes) -> list[int]:
    """The tokens of single letters."""
    backend = Tokenizer.from_str(_backend())
    return [backend.token_to_id("Ġ" if c == " " else c) for c in text.decode()]


def test_each_answer_has_processors_of_its_own(engine: Engine) -> None:
    made: list[Script] = []

    def make() -> Script:
        made.append(Script(b"Paris"))
        return made[-1]

    texts, _ = ends(engine, Request(text=PROMPT, n=2, max_tokens=5, processors=(make,)))
    assert texts == {0: "Paris", 1: "Paris"}
    assert [script.lengths for script in made] == [list(range(5))] * 2
    # A full skip's first token is processed, and its logits stay the model's own.
    again = run(engine, None, text=PROMPT, max_tokens=5, processors=(make,))
    assert (again.text, again.stats.skip) == ("Paris", "full")
    assert difference(again.logits[:1], run(engine, None, text=PROMPT).logits[:1]) <= 1e-5


def test_a_processor_that_fails_ends_its_request_only(engine: Engine) -> None:
    def broken(tokens: Sequence[int], logits: Any) -> Any:
        raise ZeroDivisionError

    other = engine.generate(Request(text=PROMPT, max_tokens=30, ignore_eos=True))
    with pytest.raises(ZeroDivisionError):
        run(engine, None, text=PROMPT, processors=(lambda: broken,))
    assert list(other)[-1].reason == "length"  # type: ignore[union-attr]


def test_a_script_against_the_guide_is_an_error(engine: Engine) -> None:
    with pytest.raises(UsageError, match="guided any further"):
        guided(engine, Guide.schema(POINT), processors=(lambda: Script(b"Paris"),))


def test_a_mask_costs_less_than_a_millisecond_a_token(engine: Engine) -> None:
    def measure(worker: Any) -> float:
        masks = worker.token_masks
        mask = masks.mask(masks.compile(Guide.schema(POINT)).result())
        import mlx.core as mx

        logits = mx.zeros((1, worker.vocabulary))
        text = '{"city": "Paris", "days": [1, 2, 30], "wet": true}'
        tokens = worker.loaded.tokenizer.encode(text, add_special_tokens=False)
        times = []
        for count in range(len(tokens)):
            began = time.process_time()
            mask(tokens[:count], logits)
            times.append(time.process_time() - began)
        return float(np.median(times))

    assert engine.call(measure) < 1e-3
