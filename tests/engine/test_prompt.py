"""Prompts: the same text and ids as transformers and mlx-lm, and where each part of them ends."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_model import TEMPLATE, tool, write_chat_model, write_chat_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.events import Request
from engine.models import find_local
from engine.prompt.boundaries import chat_segments, unstable_at
from engine.prompt.encode import encode
from engine.prompt.template import ChatTemplate
from engine.prompt.tokenizer import PromptTokenizer, adopt, load_tokenizer
from kvdb.errors import PromptError
from kvdb.history import MAX_TEXT
from kvdb.segments import Segment, dump_segments, load_segments

TOOLS = [tool("search"), tool("weather", city="Ein Ort in Österreich <b>")]
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief & kind."},
    {"role": "user", "content": "What is 2 < 3?", "name": None},
    {"role": "assistant", "content": "<think>Easy.</think>\n\nTrue."},
    {"role": "user", "content": "Und das Wetter? 🌦"},
    {
        "role": "assistant",
        "content": None,
        "reasoning": "A tool knows.",
        "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Wien"}}}],
    },
    {"role": "tool", "content": '{"degrees": 3.5}'},
]
# Ways to write templates that differ in what a span can be had from.
TEMPLATES = {
    "chatml with tools": TEMPLATE,
    "an index instead of a loop variable": (
        "{% for i in range(messages | length) %}{% set m = messages[i] %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "all tools as one list, in the last message of a user": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' and loop.last and tools %}"
        "[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}"
        "{% generation %}[{{ m.role }}] {{ m.content | trim }}{% endgeneration %}"
        "{% if not loop.last %}{{ eos_token }}{% endif %}{% endfor %}"
    ),
    "turns must alternate": (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Roles must alternate') }}{% endif %}"
        "{{ '[INST] ' + m.content + ' [/INST]' if m.role == 'user' else m.content + eos_token }}"
        "{% endfor %}"
    ),
    "a macro, indented tools, reasoning": (
        "{% macro turn(m) %}<|im_start|>{{ m['role'] }}{% if m.reasoning_content is defined %}"
        "<think>{{ m.reasoning_content }}</think>{% endif %}\n{{ m['content'] }}"
        "<|im_end|>{% endmacro %}"
        "{% for t in tools or [] %}{{ t | tojson(indent=2) }}\n{% endfor %}"
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'tool' %}"
        "{% continue %}{% endif %}{% set ns.n = ns.n + 1 %}{{ turn(m) }}{% endfor %}"
        "{{ ns.n }}{{ dict(a=1) | tojson }}{{ enable_thinking }}"
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tokenizer")
    write_chat_tokenizer(made)
    return made


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    """The tokenizer as transformers has it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def ours(theirs: Any) -> PromptTokenizer:
    made = adopt(theirs)
    assert made is not None
    return made


def render(theirs: Any, template: str, messages: Any, tools: Any = None, **options: Any) -> str:
    options = {"add_generation_prompt": True, "enable_thinking": True, **options}
    text: str = theirs.apply_chat_template(
        messages, tools=tools, chat_template=template, tokenize=False, **options
    )
    return text


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_text_is_that_of_transformers(
    theirs: Any, ours: PromptTokenizer, name: str, tools: Any
) -> None:
    assert ours.template is not None
    mine = ChatTemplate(TEMPLATES[name], ours.template.specials, thinking=True)
    accepted = 0
    for count in range(1, len(CHAT) + 1):
        for start in (0, 1):
            chat = CHAT[start:count]
            if not chat:
                continue
            try:
                expected = render(theirs, TEMPLATES[name], chat, tools)
            except Exception:  # whatever the template raises there
                with pytest.raises(PromptError):
                    mine.render(chat, tools)
                continue
            assert mine.render(chat, tools) == expected
            accepted += 1
    assert accepted >= 3


def test_a_template_may_not_leave_the_sandbox() -> None:
    for source in (
        "{{ ''.__class__.__mro__ }}",
        "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
        "{{ dict.__class__.__base__.__subclasses__() }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ 1 / 0 }}",
        "{% for m in",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ):
        with pytest.raises(PromptError):
            ChatTemplate(source, {}, thinking=False).render([{"role": "user", "content": "x"}])


def parts(ours: PromptTokenizer, messages: Any, tools: Any = None, source: str = TEMPLATE) -> Any:
    assert ours.template is not None
    template = ChatTemplate(source, ours.template.specials, thinking=True)
    text = template.render(messages, tools)
    encoding = ours.encode(text, special=False)
    ends = np.array([end for _, end in encoding.offsets])
    return chat_segments(template, messages, tools, {}, text, ends), text, encoding


PLAIN = [*CHAT[:2], {"role": "assistant", "content": "True."}, *CHAT[3:4]]


@pytest.mark.parametrize("name", ["chatml with tools", "an index instead of a loop variable"])
def test_ends_are_those_of_prefixes(theirs: Any, ours: PromptTokenizer, name: str) -> None:
    """What the text of the first k messages is tokenized to, ends where part k ends."""
    segments, _, encoding = parts(ours, PLAIN, source=TEMPLATES[name])
    found = {part.index: part.end for part in segments if part.index is not None}
    for count in range(1, len(PLAIN) + 1):
        text = render(theirs, TEMPLATES[name], PLAIN[:count], add_generation_prompt=False)
        assert found[count - 1] == len(theirs.encode(text, add_special_tokens=False))
    assert segments[-1].end == len(encoding.ids)
    assert [part.kind for part in segments] == ["system", *["message"] * 3, "template"]
    assert [part.role for part in segments[1:4]] == ["user", "assistant", "user"]


@pytest.mark.parametrize(
    "name", ["chatml with tools", "all tools as one list, in the last message of a user"]
)
def test_tools_have_their_own_text(ours: PromptTokenizer, name: str) -> None:
    segments, text, encoding = parts(ours, PLAIN, TOOLS, TEMPLATES[name])
    start = 0
    found = []
    for part in segments:
        end = encoding.offsets[part.end - 1][1]
        if part.kind == "tool":
            found.append((part.index, part.name, json.loads(text[start:end].strip())))
        start = end
    assert found == [(0, "search", TOOLS[0]), (1, "weather", TOOLS[1])]
    kinds = [part.kind for part in segments]
    if "{%- for tool in tools %}" in TEMPLATES[name]:  # a round of the loop is all the tool's
        assert kinds == ["system", "tool", "tool", "template", *["message"] * 3, "template"]


def test_a_part_that_refuses_to_stand_alone_is_found(ours: PromptTokenizer) -> None:
    """An answer alone cannot be rendered here: the loop's own rounds tell where it ends."""
    source = TEMPLATES["turns must alternate"]
    segments, text, encoding = parts(ours, PLAIN[1:], source=source)
    texts = [text[: encoding.offsets[part.end - 1][1]] for part in segments]
    assert texts[0] == "[INST] What is 2 < 3? [/INST]"
    assert texts[1] == texts[0] + "True.<|im_end|>"
    assert [part.index for part in segments] == [0, 1, 2]


def test_a_template_that_is_not_prefix_stable_is_told(ours: PromptTokenizer) -> None:
    assert ours.template is not None
    for chat, expected in ((CHAT, 3), (PLAIN, None)):
        text = ours.template.render(chat)
        assert unstable_at(ours.template, chat, None, {}, text) == expected


def test_marks_in_a_message_make_no_wrong_parts(ours: PromptTokenizer) -> None:
    chat = [{"role": "user", "content": "\U000f5a3em0s\U000f5a3f"}, *PLAIN[2:]]
    segments, text, encoding = parts(ours, chat)
    assert [part.end for part in segments][-1:] in ([], [len(encoding.ids)])
    for part in segments:
        assert text[: encoding.offsets[part.end - 1][1]].endswith(("<|im_end|>\n", "assistant\n"))


texts_ = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@settings(max_examples=60, deadline=None)
@given(contents=st.lists(texts_, min_size=1, max_size=6))
def test_parts_cover_the_prompt_and_end_between_messages(
    ours: PromptTokenizer, contents: list[str]
) -> None:
    roles = ("user", "assistant")
    chat = [{"role": roles[n % 2], "content": text} for n, text in enumerate(contents)]
    segments, _, encoding = parts(ours, chat)
    ends = [part.end for part in segments]
    assert ends == sorted(set(ends))
    assert ends[-1] == len(encoding.ids)
    at = 0
    for n, end in enumerate(ends[: len(chat)]):
        at += len(f"<|im_start|>{roles[n % 2]}\n{dropped(contents, n)}<|im_end|>\n")
        assert encoding.offsets[end - 1][1] == at


def dropped(contents: Sequence[str], n: int) -> str:
    """What the template makes of a message: it drops reasoning before the last question."""
    last = (len(contents) - 1) // 2 * 2
    content = contents[n]
    if n % 2 and n < last and "</think>" in content:
        content = content.split("</think>")[-1].lstrip("\n")
    return content


# -- segments as text ----------------------------------------------------------------------------


def test_segments_survive_their_text() -> None:
    segments = [
        Segment("system", 9, role="system", index=0, digest="ab"),
        Segment("tool", 20, index=0, name="find", digest="cd"),
        Segment("message", 31, role="user", index=1, digest="ef"),
    ]
    loaded = load_segments(dump_segments(segments))
    assert [part.end for part in loaded] == [9, 20, 31]
    assert [part.title(1) for part in loaded] == [
        "system prompt",
        "tool 1 of 1 (find)",
        "message 2 (user)",
    ]


@pytest.mark.parametrize("text", [None, "", "{", "1", "[1, null]", '[{"kind": 1, "end": "x"}]'])
def test_what_is_not_segments_is_none(text: str | None) -> None:
    assert load_segments(text) == []


def test_a_long_conversation_fits_into_history() -> None:
    segments = [
        Segment("message", 10 * n + 10, role="assistant", index=n, digest=f"{n:016x}")
        for n in range(20_000)
    ]
    text = dump_segments(segments)
    assert text is not None
    assert len(text) < MAX_TEXT
    loaded = load_segments(text)
    assert loaded[:50] == segments[:50]
    assert loaded[-150:] == segments[-150:]
    assert sum(part.count for part in loaded) == 20_000
    assert loaded[120].title() == f"messages {loaded[120].index + 1} to {loaded[121].index}"  # type: ignore[operator]


# -- the tokenizer -------------------------------------------------------------------------------

LOAD = """
import sys
from pathlib import Path
from engine.prompt.tokenizer import load_tokenizer
tokenizer = load_tokenizer(Path(sys.argv[1]))
text = tokenizer.template.render([{"role": "user", "content": "Hello"}])
print(tokenizer.encode(text, special=False).ids, *({"mlx", "transformers"} & set(sys.modules)))
"""


def load(folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(folder)], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_a_known_tokenizer_needs_neither_mlx_nor_transformers(tmp_path: Path, theirs: Any) -> None:
    write_chat_tokenizer(tmp_path)
    expected = str(
        theirs.apply_chat_template(
            [{"role": "user", "content": "Hello"}], add_generation_prompt=True, return_dict=False
        )
    )
    assert load(tmp_path) == f"{expected} transformers"
    assert load(tmp_path) == expected
    write_chat_tokenizer(tmp_path, TEMPLATE.replace("assistant", "model"))
    changed = load_tokenizer(tmp_path).template
    assert changed is not None
    assert changed.render([{"role": "user", "content": "Hello"}]).endswith("model\n")


def test_the_engine_and_the_light_tokenizer_agree(
    tmp_path: Path, make_engine: Any, theirs: Any
) -> None:
    """Also where the engine's own tokenizer renders and encodes."""
    model = write_chat_model(tmp_path / "model")
    loaded = make_engine(None, model).call(lambda worker: worker.loaded)
    light = load_tokenizer(model)
    assert light.template is not None
    assert light.template.thinking == loaded.tokenizer.has_thinking
    for request in (
        Request(messages=CHAT, tools=TOOLS),
        Request(text="<|im_start|>user\nA text of one's own."),
        Request(text="A text without a start"),
        Request(messages=PLAIN, template_options={"enable_thinking": False}),
    ):
        engine = encode(request, loaded.prompts, None, 1024, loaded=loaded.tokenizer)
        own = encode(request, light, None, None)
        plain = encode(request, None, None, 1024, loaded=loaded.tokenizer)
        assert engine.tokens.tolist() == own.tokens.tolist() == plain.tokens.tolist()
        assert engine.segments() == own.segments() != []
        if request.messages:
            expected = theirs.apply_chat_template(
                list(request.messages),
                tools=request.tools,
                add_generation_prompt=True,
                return_dict=False,
                **{"enable_thinking": True, **request.template_options},
            )
            assert own.tokens.tolist() == expected


@pytest.mark.model
def test_a_real_model_has_the_same_prompts() -> None:
    """SmolLM2's own tokenizer and template, against transformers."""
    from transformers import AutoTokenizer

    folder = find_local("smollm2-135m")
    assert folder is not None
    light, own = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    chat = [*CHAT[:4], {"role": "assistant", "content": "Es regnet.\n\n"}]
    prompt = encode(Request(messages=chat), light, None, None)
    assert prompt.tokens.tolist() == own.apply_chat_template(
        chat, add_generation_prompt=True, return_dict=False
    )
    for part in prompt.segments()[:-1]:
        assert part.index is not None
        prefix = own.apply_chat_template(chat[: part.index + 1], return_dict=False)
        assert part.end == len(prefix)
    assert light.decode(prompt.tokens.tolist()) == prompt.text
