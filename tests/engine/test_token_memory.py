"""Token memory: a chat that repeats our answers as text has the very tokens that we generated."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from chat_model import CORPUS, tool, write_chat_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from test_prompt_tools import CHATML

from engine.answers import AnswerParser, AnswerStyle, ReasoningPiece, TextPiece, ToolCallArguments
from engine.answers import ToolCallStart as Start
from engine.events import Request
from engine.prompt.encode import Prompt, encode
from engine.prompt.memory import TokenMemory
from engine.prompt.tokenizer import PromptTokenizer, load_tokenizer
from engine.prompt.tools import chat_template
from kvdb.answers import Answer, find_answers, remember_answer, trim_answers
from kvdb.identity import Tokens, as_tokens
from kvdb.store import Store

TOOLS = [tool("search"), tool("weather", city="A city")]
# Qwen3's way: reasoning is written while tools are at work, and dropped once the user speaks again.
THINKING = """\
{%- set ns = namespace(last=0) %}
{%- for m in messages if m.role == 'user' %}{% set ns.last = messages.index(m) %}{% endfor %}
{%- if tools %}{% for t in tools %}{{ t | tojson }}{{ '\n' }}{% endfor %}{% endif %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.reasoning_content and loop.index0 > ns.last %}
{{- '<think>\n' + m.reasoning_content.strip('\n') + '\n</think>\n\n' }}
{%- endif %}
{{- (m.content or '').lstrip('\n') if m.role == 'assistant' else m.content }}
{%- for call in m.tool_calls or [] %}
{%- if m.content or not loop.first %}{{- '\n' }}{% endif %}
{{- '<tool_call>\n' }}{{ call.function | tojson }}{{ '\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}
"""
END = "<|im_end|>"
Chat = list[dict[str, Any]]


class Memory:
    """A memory beside a store that is a dictionary, with a tokenizer."""

    def __init__(self, tokenizer: PromptTokenizer) -> None:
        self.tokenizer = tokenizer
        self.stored: dict[bytes, list[Tokens]] = {}
        self.memory = TokenMemory(tokenizer, self.fetch)
        self.fetched = 0

    def fetch(self, keys: Sequence[bytes]) -> Mapping[bytes, Sequence[Tokens]]:
        self.fetched += 1
        return {key: self.stored[key] for key in keys if key in self.stored}

    def restart(self) -> None:
        self.memory = TokenMemory(self.tokenizer, self.fetch)

    def encode(self, messages: Chat, tools: Any = None, salt: bytes = b"") -> Prompt:
        request = Request(messages=messages, tools=tools)
        recall = partial(self.memory.recall, salt)
        return encode(request, self.tokenizer, None, None, recall=recall)

    def ids(self, pieces: Sequence[str]) -> list[int]:
        """The tokens of pieces of a text, cut between them."""
        found = [self.tokenizer.encode(piece, special=False).ids for piece in pieces]
        return [id_ for ids in found for id_ in ids]

    def answer(
        self, prompt: Prompt, pieces: Sequence[str], *, said: str | None = None, salt: bytes = b""
    ) -> list[int]:
        """Remember an answer that was generated in ``pieces``."""
        ids, ended = self.ids(pieces), pieces[-1:] == [END]
        text = "".join(pieces[:-1] if ended else pieces) if said is None else said
        answer = self.memory.remember(prompt.text or "", ids, text, salt, ended=ended)
        if answer is not None:
            self.stored.setdefault(answer.key, []).insert(0, answer.tokens)
        return ids


def tokenizer(folder: Path, template: str = CHATML) -> PromptTokenizer:
    write_chat_tokenizer(folder, template)
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> PromptTokenizer:
    return tokenizer(tmp_path_factory.mktemp("chatml"))


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> PromptTokenizer:
    return tokenizer(tmp_path_factory.mktemp("thinking"), THINKING)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def begins(prompt: Prompt, ids: Sequence[int]) -> bool:
    return prompt.tokens[: len(ids)].tolist() == list(ids)


# -- seams ---------------------------------------------------------------------------------------

texts_ = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd")
    | st.sampled_from("ab \n"),
    min_size=1,
    max_size=24,
)


@st.composite
def turns_(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A question, and an answer in pieces as it may be generated."""
    text = draw(texts_)
    cuts = sorted(draw(st.sets(st.integers(1, len(text)), max_size=len(text))))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)]) if a < b]
    return draw(texts_), [*pieces, *([END] if draw(st.booleans()) else [])]


@settings(max_examples=150, deadline=None)
@given(turns=st.lists(turns_(), min_size=1, max_size=5), restart=st.booleans())
def test_the_tokens_say_the_text_and_begin_with_those_of_the_turn_before(
    chatml: PromptTokenizer, turns: list[tuple[str, list[str]]], restart: bool
) -> None:
    made, chat, before = Memory(chatml), [], list[int]()
    for question, pieces in turns:
        chat.append(user(question))
        prompt = made.encode(chat)
        assert chatml.decode(prompt.tokens.tolist()) == prompt.text
        assert begins(prompt, before)
        ends = [part.end for part in prompt.segments()]
        assert ends == sorted(set(ends))
        assert ends[-1] == len(prompt.tokens)
        before = [*prompt.tokens.tolist(), *made.answer(prompt, pieces)]
        chat.append(assistant("".join(pieces).removesuffix(END)))
        if restart:
            made.restart()


@settings(max_examples=100, deadline=None)
@given(turn=turns_(), edit=st.tuples(st.integers(0, 30), st.sampled_from(["", "x", " ", "é"])))
def test_another_answer_than_ours_is_tokenized_as_ever(
    chatml: PromptTokenizer, turn: tuple[str, list[str]], edit: tuple[int, str]
) -> None:
    made, (question, pieces) = Memory(chatml), turn
    made.answer(made.encode([user(question)]), pieces)
    text = "".join(pieces).removesuffix(END)
    at = edit[0] % (len(text) + 1)
    chat = [user(question), assistant(text[:at] + edit[1] + text[at + 1 :]), user("And?")]
    prompt = made.encode(chat)
    assert chatml.decode(prompt.tokens.tolist()) == prompt.text


def test_seams_are_where_the_model_had_them(chatml: PromptTokenizer) -> None:
    """The end token is the answer's own, the line end behind it is tokenized as behind any."""
    made, chat = Memory(chatml), [user("Which city?")]
    prompt = made.encode(chat)
    ids = made.answer(prompt, ["P", "ar", "is", END])
    after = made.encode([*chat, assistant("Paris"), user("Why?")])
    rest = made.ids(["\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"])
    assert after.tokens.tolist() == [*prompt.tokens.tolist(), *ids, *rest]
    assert ids != made.ids(["Paris", END])
    # Behind the message, not behind its text, ends its part.
    ends = [part.end for part in after.segments() if part.kind == "message"]
    newline = made.ids(["\n"])
    assert ends[1] == len(prompt.tokens) + len(ids) + len(newline)


def test_what_the_client_was_not_told_is_not_of_the_answer(chatml: PromptTokenizer) -> None:
    made, chat = Memory(chatml), [user("Which city?")]
    prompt = made.encode(chat)
    made.answer(prompt, ["P", "ar", "is", "\nUs", "er:"], said="Paris")
    after = made.encode([*chat, assistant("Paris"), user("Why?")])
    assert begins(after, [*prompt.tokens.tolist(), *made.ids(["P", "ar", "is", END])])
    # Half of a character, where the tokens ran out.
    half = made.ids(["W", "ü"])[:-1]
    answer = made.memory.remember(prompt.text or "", half, "W\ufffd", b"", ended=False)
    assert answer is not None
    assert answer.tokens.tolist() == made.ids(["W"])
    assert made.memory.remember(prompt.text or "", half, "W", b"", ended=True) is None


def test_an_end_token_that_was_spelled_is_none(chatml: PromptTokenizer) -> None:
    """Its text is that of the end of every turn, which must be the token."""
    made, chat = Memory(chatml), [user("Which city?")]
    prompt = made.encode(chat)
    assert made.answer(prompt, ["Paris", *END]) != made.ids(["Paris", END])
    after = made.encode([*chat, assistant("Paris"), user("Why?")])
    plain = encode(after.request, chatml, None, None)
    assert after.tokens.tolist() == plain.tokens.tolist()


def test_of_several_answers_the_one_that_is_repeated_is_taken(chatml: PromptTokenizer) -> None:
    made, chat = Memory(chatml), [user("Which city?")]
    prompt = made.encode(chat)
    answers = {text: made.answer(prompt, [*text, END]) for text in ("Paris", "Rome", "Paris, yes")}
    for text, ids in answers.items():
        after = made.encode([*chat, assistant(text), user("Why?")])
        assert begins(after, [*prompt.tokens.tolist(), *ids])
    made.restart()
    newest = made.answer(prompt, ["Par", "is", END])
    assert begins(made.encode([*chat, assistant("Paris")]), [*prompt.tokens.tolist(), *newest])
    older = made.encode([*chat, assistant("Rome")])  # it is not only the newest that is known
    assert begins(older, [*prompt.tokens.tolist(), *answers["Rome"]])


def test_another_end_token_than_the_templates_costs_only_itself(tmp_path: Path) -> None:
    made = Memory(tokenizer(tmp_path, CHATML.replace("'<|im_end|>'", "'</think>'")))
    chat = [user("Which city?")]
    prompt = made.encode(chat)
    ids = made.answer(prompt, ["P", "ar", "is", END])
    after = made.encode([*chat, assistant("Paris"), user("Why?")])
    assert begins(after, [*prompt.tokens.tolist(), *ids[:-1]])
    assert made.tokenizer.decode(after.tokens.tolist()) == after.text


def test_other_salts_prompts_and_tokenizers_know_nothing(
    chatml: PromptTokenizer, tmp_path: Path
) -> None:
    made, chat = Memory(chatml), [user("Which city?")]
    pieces = ["P", "ar", "is", END]
    ids = [*made.encode(chat).tokens.tolist(), *made.answer(made.encode(chat), pieces)]
    more = [*chat, assistant("Paris"), user("Why?")]
    assert begins(made.encode(more), ids)
    assert not begins(made.encode(more, salt=b"tenant"), ids)
    other = [user("Which town?"), *more[1:]]
    plain = encode(Request(messages=other), chatml, None, None)
    assert made.encode(other).tokens.tolist() == plain.tokens.tolist()
    added = tokenizer(tmp_path)
    added.backend.add_tokens(["Whic"])
    assert load_tokenizer(tmp_path).digest == chatml.digest
    salted = Memory(chatml)
    salted.answer(salted.encode(chat), pieces, salt=b"tenant")
    assert begins(salted.encode(more, salt=b"tenant"), ids)
    assert not begins(salted.encode(more), ids)


SPACED = (
    "{{ '<s>' }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content }}"
    "{{ ' [/INST]' }}{% else %}{{ ' ' + m.content + '</s>' }}{% endif %}{% endfor %}"
)
LINES = (
    "{% for m in messages %}{{ '<s>' + m.role + '\n' + m.content + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize("template", [SPACED, LINES])
@pytest.mark.parametrize("scheme", ["first", "never"])
def test_tokenizers_that_mark_words_by_a_space(scheme: str, template: str) -> None:
    """Those of Mistral, Llama 2 and Gemma put a space before what comes first, and only there."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))  # noqa: S106
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    strip = [decoders.Strip(" ", 1, 0)] if scheme == "first" else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    backend.train_from_iterator(CORPUS.split(". "), trainer)
    own = PromptTokenizer(
        backend, chat_template(template, {}, False), None, AnswerStyle(), bytes(32)
    )
    made, chat = Memory(own), [user("The weather of the city")]
    prompt = made.encode(chat)
    letters = ("▁" if template is SPACED else "") + "Paris▁is"
    ids = [backend.token_to_id(letter) for letter in [*letters, "</s>"]]
    answer = made.memory.remember(prompt.text or "", ids, "Paris is", b"", ended=True)
    assert answer is not None
    after = made.encode([*chat, assistant("Paris is"), user("the time")])
    assert begins(after, [*prompt.tokens.tolist(), *ids])
    assert own.decode(after.tokens.tolist()) == after.text


# -- tools and reasoning -------------------------------------------------------------------------


def as_sent_back(style: AnswerStyle, text: str) -> dict[str, Any]:
    """The message that a client makes of an answer's pieces."""
    parser, ids = AnswerParser(style, TOOLS, lambda: f"call_{next(ids)}"), itertools.count()
    message: dict[str, Any] = assistant("")
    for piece in [*parser.feed(text), *parser.end()]:
        if isinstance(piece, TextPiece):
            message["content"] += piece.text
        elif isinstance(piece, ReasoningPiece):
            message["reasoning_content"] = message.get("reasoning_content", "") + piece.text
        elif isinstance(piece, Start):
            function = {"name": piece.name, "arguments": ""}
            call = {"type": "function", "id": piece.id, "function": function}
            message.setdefault("tool_calls", []).append(call)
        elif isinstance(piece, ToolCallArguments):
            message["tool_calls"][piece.index]["function"]["arguments"] = piece.text
    return message


def parsed(message: dict[str, Any]) -> dict[str, Any]:
    """As engine.prompt.bodies hands it to templates."""
    from engine.prompt.bodies import parse_body

    (chat,) = parse_body({"messages": [message]}).messages or ()
    return chat


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Wien, ü"}}\n</tool_call>'
RESULT = {"role": "tool", "tool_call_id": "call_0", "content": "sunny"}


@pytest.mark.parametrize(
    "text",
    [CALL, f"I look.\n{CALL}", f"I look.\n\n{CALL}", f"{CALL}\n{CALL}", "No tool knows that.\n"],
)
def test_calls_keep_their_tokens_in_our_own_template(chatml: PromptTokenizer, text: str) -> None:
    made, chat = Memory(chatml), [user("The weather?")]
    prompt = made.encode(chat, TOOLS)
    ids = made.answer(prompt, [*text, END])
    message = parsed(as_sent_back(chatml.style, text))
    after = made.encode([*chat, message, RESULT], TOOLS)
    assert begins(after, [*prompt.tokens.tolist(), *ids])
    assert chatml.decode(after.tokens.tolist()) == after.text


def test_reasoning_keeps_its_tokens_until_the_template_drops_it(thinking: PromptTokenizer) -> None:
    style = AnswerStyle(("<think>", "</think>"), "json_tools")
    made, chat = Memory(thinking), [user("The weather?")]
    first = made.encode(chat, TOOLS)
    text = f"<think>\nA tool knows.\n</think>\n\nI look.\n{CALL}"
    ids = made.answer(first, [*re.findall("</?think>|.|\n", text), END])
    chat += [parsed(as_sent_back(style, text)), RESULT]
    second = made.encode(chat, TOOLS)
    assert begins(second, [*first.tokens.tolist(), *ids])
    more = made.answer(second, [*"Sunny.", END])
    third = made.encode([*chat, assistant("Sunny."), user("Thanks.")], TOOLS)
    # The user spoke: the first answer is written without its reasoning, and all behind it moves.
    assert begins(third, first.tokens.tolist())
    assert not begins(third, [*first.tokens.tolist(), *ids[:2]])
    plain = encode(third.request, thinking, None, None)
    assert third.tokens.tolist() == plain.tokens.tolist()
    assert third.unstable_at() == 2
    # From there on the conversation hits again.
    last = made.answer(third, [*"Bye.", END])
    final = [*chat, assistant("Sunny."), user("Thanks."), assistant("Bye."), user("Oh.")]
    assert begins(made.encode(final, TOOLS), [*third.tokens.tolist(), *last])
    assert more


# -- in the store --------------------------------------------------------------------------------


def kept(connection: Any, *keys: int) -> list[int]:
    """The first token of each answer under some keys, newest first for each."""
    names = [key.to_bytes(32, "big") for key in keys]
    found = find_answers(connection, names)
    return [int(tokens[0]) for name in names for tokens in found[name]]


def test_answers_are_kept_by_key_and_forgotten_by_number_size_and_age(store: Store) -> None:
    def remember(key: int, number: int) -> None:
        tokens = as_tokens([number] * 218)  # 1000 bytes, with those of the row
        remember_answer(connection, Answer(key.to_bytes(32, "big"), tokens), number)

    day = 24 * 3600 * 1_000_000
    with store.database.write() as connection:
        for number in range(100):
            remember(0, number)
        remember(0, 80)
        assert kept(connection, 0) == [80, *(n for n in reversed(range(36, 100)) if n != 80)]
        for number in range(100, 200):
            remember(number, number)
        trim_answers(connection, 50_000, 200)
        assert kept(connection, 0, *range(100, 200)) == list(range(150, 200))
        trim_answers(connection, 50_000, 190 + 90 * day)
        assert kept(connection, *range(200)) == list(range(190, 200))
        (nbytes,) = connection.execute(
            "SELECT value FROM counters WHERE name = 'answer_bytes'"
        ).fetchone()
        assert nbytes == 10_000
    assert len(store.answers([(199).to_bytes(32, "big")])) == 1
