"""Token memory through the engine: a conversation hits all that was said, also after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from chat_model import write_chat_model
from test_prompt_tools import CHATML
from test_token_memory import (
    END,
    Chat,
    assistant,
    user,
)

import kvdb
from engine import Engine
from engine.events import End, Request, Sampling, Token
from engine.prompt.encode import encode
from engine.prompt.tokenizer import load_tokenizer
from kvdb.explain import explain_request
from kvdb.store import Store

BLOCK = 16
QUESTIONS = ["Which city?", "And the weather there?", "In short, please.", "Thanks. Another?"]


def spelled(folder: Path) -> Sampling:
    """Sampling of single letters, which the tokenizer would join, and of the end now and then."""
    known = load_tokenizer(folder).backend.get_vocab()
    bias = {known[letter]: 1000.0 for letter in "aeinorst"}
    return Sampling(temperature=1.0, seed=5, logit_bias={**bias, known[END]: 999.0})


def turn(engine: Engine, chat: Chat, **options: Any) -> tuple[list[int], list[int], str, End]:
    """Prompt ids, generated ids, text and end of an answer."""
    request = Request(messages=chat, max_tokens=12, **options)
    prompt: list[int] = engine.call(lambda worker: worker.encode(request).tokens.tolist())
    events = list(engine.generate(request))
    end = events[-1]
    assert isinstance(end, End)
    tokens = [event for event in events if isinstance(event, Token)]
    text = "".join(token.text for token in tokens) + end.text
    return prompt, [token.id for token in tokens], text, end


def as_ever(chat: Chat, worker: Any) -> list[int]:
    """The tokens of a chat without any memory."""
    prompt = encode(Request(messages=chat), worker.loaded.prompts, None, None)
    return prompt.tokens.tolist()


def test_a_conversation_hits_all_that_was_said(
    tmp_path: Path, store: Store, make_engine: Any
) -> None:
    folder = write_chat_model(tmp_path / "model")
    engine = make_engine(store, folder, block_tokens=BLOCK)
    chat: Chat = []
    before: list[int] = []
    reasons = set()
    as_generated = False
    for question in QUESTIONS:
        chat.append(user(question))
        prompt, ids, text, end = turn(engine, chat, sampling=spelled(folder))
        assert prompt[: len(before)] == before
        # All but the last token, whose state may not have been computed.
        assert end.stats.restored_tokens >= len(before) - 1
        tokenized = partial(as_ever, chat)
        as_generated |= prompt != engine.call(tokenized)
        before = [*prompt, *ids]
        reasons.add(end.reason)
        chat.append(assistant(text))
    assert reasons == {"stop", "length"}
    assert as_generated  # else nothing was shown
    chat.append(user("Bye."))
    told = turn(engine, chat, sampling=spelled(folder), remember=False)
    chat += [assistant(told[2]), user("Bye.")]
    prompt = turn(engine, chat)[0]
    assert prompt[: len(told[0])] == told[0]
    assert prompt[: len(told[0]) + len(told[1])] != [*told[0], *told[1]]


def test_explain_names_the_answer_that_lost_its_reasoning(
    tmp_path: Path, store: Store, make_engine: Any
) -> None:
    folder = write_chat_model(tmp_path / "model", template=CHATML)
    engine = make_engine(store, folder, block_tokens=BLOCK)
    thinks = Sampling(logit_bias={load_tokenizer(folder).backend.token_to_id("<think>"): 1000.0})
    chat = [user(QUESTIONS[0])]
    assert turn(engine, chat, sampling=thinks)[2].startswith("<think>")
    turn(engine, [*chat, assistant("Sunny."), user(QUESTIONS[1])])
    store.flush(30)
    explanation = explain_request(store, 2, load_tokenizer(folder).decode)
    assert (explanation.code, explanation.where) == ("rerendered", "message 2 (assistant)")


KILLED = """
import json, os, signal, sys
from pathlib import Path
from engine import blas
blas.preload()
import kvdb
from engine import Engine, EngineOptions
from test_token_memory import user
from test_token_memory_engine import turn, spelled, BLOCK, QUESTIONS

folder = Path(sys.argv[1])
store = kvdb.open(sys.argv[2], min_free_bytes=0)
engine = Engine(store, str(folder), options=EngineOptions(BLOCK))
prompt, ids, text, _ = turn(engine, [user(QUESTIONS[0])], sampling=spelled(folder))
store.flush(30)
print(json.dumps([prompt, ids, text]), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_conversation_goes_on_after_a_kill(tmp_path: Path, make_engine: Any) -> None:
    folder = write_chat_model(tmp_path / "model")
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(folder), str(tmp_path / "store")],
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    prompt, ids, text = json.loads(done.stdout)
    chat = [user(QUESTIONS[0]), assistant(text), user(QUESTIONS[1])]
    options = ["--model", folder, "--store", tmp_path / "store", "--block-tokens", str(BLOCK)]
    explained = subprocess.run(
        [sys.executable, "-m", "kvdb", "explain", "--json", "--file", "-", *map(str, options)],
        input=json.dumps(chat),
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert explained.returncode == 0, explained.stderr
    assert json.loads(explained.stdout)["hit_tokens"] >= len(prompt) + len(ids) - 1
    with kvdb.open(tmp_path / "store", min_free_bytes=0) as store:
        engine = make_engine(store, folder, block_tokens=BLOCK)
        after, _, _, end = turn(engine, chat)
        engine.close()
        assert after[: len(prompt) + len(ids)] == [*prompt, *ids]
        assert end.stats.restored_tokens >= len(prompt) + len(ids) - 1
