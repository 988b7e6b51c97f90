"""What is offered at the cursor."""

from __future__ import annotations

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document

from kvdb.shell.completion import SqlCompleter
from kvdb.shell.schema import LiveSchema
from kvdb.shell.session import Session


def offered(
    session: Session, text: str, *, tab: bool = False, cursor: int | None = None
) -> list[str]:
    completer = SqlCompleter(LiveSchema(session.store))
    event = CompleteEvent(completion_requested=tab, text_inserted=not tab)
    return [c.text for c in completer.get_completions(Document(text, cursor), event)]


@pytest.mark.parametrize(
    ("text", "some"),
    [
        (".mi", [".miss"]),
        (".mode ma", ["markdown"]),
        (".schema daily_w", ["daily_wear"]),
        (".help sav", ["savings"]),
        ("sel", ["select"]),
        ("SEL", ["SELECT"]),
        ("SELECT * FROM block_u", ["block_usage"]),
        ("SELECT * FROM ", ["blocks", "hit_history", "savings"]),
        ("SELECT * FROM blocks JOIN na", ["namespaces"]),
        ("SELECT * FROM requests WHERE miss", ["miss_reason"]),
        ("SELECT * FROM requests AS r WHERE r.miss", ["miss_reason"]),
        ("SELECT blocks.dep", ["depth"]),
        ("SELECT human", ["human_bytes("]),
        ("SELECT 'a' || tok", ["tokens(", "token_text("]),
    ],
)
def test_offers(session: Session, text: str, some: list[str]) -> None:
    assert set(some) <= set(offered(session, text))


def test_columns_are_those_of_the_named_tables(session: Session) -> None:
    text = "SELECT mod FROM capacity"
    assert "model" in offered(session, text, cursor=10)
    assert offered(session, "SELECT checksu FROM capacity", cursor=14) == []
    assert "checksum" in offered(session, "SELECT checksu")


@pytest.mark.parametrize("text", ["", "SELECT 'blo", "SELECT 1 -- blo", "/* blo", "SELECT "])
def test_nothing_is_offered_unasked(session: Session, text: str) -> None:
    assert offered(session, text) == []


def test_tab_offers_columns(session: Session) -> None:
    assert "live_bytes" in offered(session, "SELECT  FROM capacity", tab=True, cursor=7)
