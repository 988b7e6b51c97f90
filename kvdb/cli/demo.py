"""``kvdb demo``: cold, again, another question, and after a kill; each run its own process."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import IO, Any

import click

from kvdb.cli.models import pull_model
from kvdb.cli.options import FLAGS, prepare_engine, settings, store_option
from kvdb.cli.output import say, table
from kvdb.errors import KvdbError, UsageError

MODEL = "smollm2-135m"
MAX_TOKENS = 16
# Progress comes at least every block, so that there is a middle to be killed in.
KILL_STEP = 256
RUN_SECONDS = 600.0
PROBLEMS_FOUND = 3
COLUMNS = (
    "run",
    "prompt",
    "restored",
    "computed",
    "forwarded",
    "first token",
    "cold",
    "sooner",
    "same text",
)

# What the demo asks the store, as one would with `kvdb query`.
QUERIES = (
    (
        "What did the requests restore and compute?",
        "SELECT skip, prompt_tokens, restored_tokens, computed_tokens,\n"
        "    round(first_token_ms) AS first_token_ms, miss_reason\n"
        "FROM hit_history ORDER BY id",
    ),
    (
        "Which blocks are used most?",
        "SELECT substr(hash, 1, 12) AS block, depth, token_count, hits, nbytes\n"
        "FROM block_usage ORDER BY hits DESC, depth LIMIT 5",
    ),
    (
        "What has it saved?",
        "SELECT model, requests, restored_tokens, seconds_saved FROM savings",
    ),
)


@dataclass(frozen=True, slots=True)
class Run:
    """What one process did: its text and statistics, or how far it got before it was killed."""

    text: str
    stats: dict[str, Any]


@click.command()
@click.option(
    "--max-tokens",
    default=MAX_TOKENS,
    show_default=True,
    type=click.IntRange(min=1),
    help="Tokens to generate in each run.",
)
@click.option(
    "--prompts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Other prompts, in JSON as in kvdb/cli/demo_prompt.json.",
)
@store_option
@click.pass_context
def demo(ctx: click.Context, max_tokens: int, prompts: Path | None) -> None:
    """Show on SmolLM2-135M what the store saves, in about two minutes.

    Every run is a process of its own. The store is a temporary one unless --store names another.
    Times and texts are compared with a cold run of the same prompt. Ends with exit code 3 when a
    text is not the same.
    """
    values = settings()
    prepare_engine(values)
    pull_model(MODEL)
    with contextlib.ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvdb-demo-")))
        named = "store" in ctx.meta.get(FLAGS, {})
        store = values["store"] if named else work / "store"
        rows = _runs(_prompt_files(prompts, work), store, max_tokens)
        click.echo(table(COLUMNS, rows))
        click.echo(
            "\nTokens of the prompt that were restored, computed, and went through the model; the "
            "time to the first\ntoken with the model loaded, and cold. Every run is a process of "
            "its own."
        )
        _queries(store)
    if any(row[-1] == "no" for row in rows):
        raise click.exceptions.Exit(PROBLEMS_FOUND)


def _runs(prompts: Mapping[str, Path], store: Path, max_tokens: int) -> list[tuple[Any, ...]]:
    run = _Runner(store, max_tokens)
    rows = []

    say("1. The prompt of an assistant with tools.")
    first = cold = run(prompts["first"])
    if first.stats["restored_tokens"]:
        say("   The store knows it already: the same without the store.")
        cold = run(prompts["first"], store=False)
    rows.append(_row("1 first time", first, cold))

    say("2. The same prompt in a new process.")
    rows.append(_row("2 same prompt", run(prompts["first"]), cold))

    say("3. Another question after the same conversation.")
    other = run(prompts["second"])
    say("   The same without the store, to compare with.")
    rows.append(_row("3 another question", other, run(prompts["second"], store=False)))

    say("4. A longer prompt of its own; the process is killed half-way.")
    done, total = run.killed(prompts["review"])
    rows.append(("4 killed (SIGKILL)", total, 0, done, done, None, None, None, None))
    say("   The same prompt in a new process.")
    again = run(prompts["review"])
    say("   The same without the store, to compare with.")
    rows.append(_row("4 same prompt again", again, run(prompts["review"], store=False)))
    return rows


def _row(name: str, run: Run, cold: Run) -> tuple[Any, ...]:
    took, alone = run.stats["first_token_ms"] / 1e3, cold.stats["first_token_ms"] / 1e3
    return (
        name,
        run.stats["prompt_tokens"],
        run.stats["restored_tokens"],
        run.stats["computed_tokens"],
        run.stats["forwarded_prompt_tokens"],
        f"{took:.3f} s",
        f"{alone:.1f} s",
        None if run is cold else f"{alone / took:.1f} x",
        None if run is cold else "yes" if run.text == cold.text else "no",
    )


class _Runner:
    """Runs `kvdb generate` in processes of their own."""

    def __init__(self, store: Path, max_tokens: int) -> None:
        self._store = store
        self._max_tokens = max_tokens

    def __call__(self, messages: Path, *, store: bool = True) -> Run:
        with self._process(messages, *(() if store else ("--no-store",))) as process:
            text = ""
            for event in _events(process):
                text += event.get("text", "")
                if event["event"] == "end":
                    process.wait(timeout=RUN_SECONDS)
                    return Run(text, event["stats"])
        raise _failure(process)

    def killed(self, messages: Path) -> tuple[int, int]:
        """Kill a run as soon as half of its prompt is done; returns (done, total) tokens."""
        with self._process(messages, "--prefill-step-size", str(KILL_STEP)) as process:
            for event in _events(process):
                if event["event"] == "progress" and 2 * event["done"] >= event["total"]:
                    process.kill()
                    return int(event["done"]), int(event["total"])
        raise _failure(process)

    @contextlib.contextmanager
    def _process(self, messages: Path, *extra: str) -> Iterator[subprocess.Popen[str]]:
        command = [
            sys.executable,
            "-m",
            "kvdb",
            "generate",
            "--json",
            "--store",
            str(self._store),
            "--model",
            MODEL,
            "--messages",
            str(messages),
            "--max-tokens",
            str(self._max_tokens),
            *extra,
        ]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            try:
                yield process
            finally:
                if process.poll() is None:
                    process.kill()


def _events(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    for line in process.stdout or ():
        yield json.loads(line)


def _failure(process: subprocess.Popen[str]) -> KvdbError:
    stream: IO[str] | None = process.stderr
    said = "" if stream is None or stream.closed else stream.read().strip()
    return KvdbError(f"A run of the demo ended with exit code {process.returncode}: {said}")


def _prompt_files(given: Path | None, work: Path) -> dict[str, Path]:
    """The prompts as message files for `kvdb generate --messages`. Raises UsageError."""
    source = resources.files("kvdb.cli") / "demo_prompt.json" if given is None else given
    try:
        prompts = _prompts(json.loads(source.read_text("utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{source} holds no prompts for the demo ({error!r}).") from error
    files = {}
    for name, messages in prompts.items():
        files[name] = work / f"{name}.json"
        files[name].write_text(json.dumps(messages), "utf-8")
    return files


def _prompts(document: dict[str, Any]) -> dict[str, list[dict[str, str]]]:
    system = {"role": "system", "content": document["system"]}
    conversation = [system, *document["history"]]
    review = document["review"]
    transcript = "\n\n".join(f"{m['role'].upper()}: {m['content']}" for m in conversation)
    prompts = {
        name: [*conversation, {"role": "user", "content": question}]
        for name, question in zip(("first", "second"), document["questions"], strict=True)
    }
    prompts["review"] = [
        {"role": "system", "content": review["system"]},
        {"role": "user", "content": "\n\n".join((review["guide"], transcript, review["question"]))},
    ]
    return prompts


def _queries(path: Path) -> None:
    import kvdb

    with kvdb.open(path, create=False, read_only=True) as store:
        for title, sql in QUERIES:
            result = store.sql(sql)
            click.echo(f"\n{title}\n\n{sql}\n")
            click.echo(table(result.columns, result.rows))
