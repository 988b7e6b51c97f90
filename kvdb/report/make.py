"""Read a store, and say what the page shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdb.errors import UsageError
from kvdb.report import sections, words
from kvdb.report.blocks import age_and_heat, read_blocks
from kvdb.report.history import History, Scope, read_history
from kvdb.report.losses import read_evictions, read_wear
from kvdb.report.misses import costliest_misses, explainer
from kvdb.report.page import Page, render
from kvdb.report.sections import Section
from kvdb.report.tree import Decoder, prefix_tree, read_beginnings

if TYPE_CHECKING:
    from kvdb.store import Store


def make_report(store: Store, scope: Scope, decoder: Decoder = lambda _: None) -> str:
    """The page about ``store``, as HTML. Without a decoder it shows nothing of any prompt.

    Reads in short transactions and writes nothing; the parts may be of slightly different moments.
    Raises UsageError for a namespace that is not there.
    """
    with store.database.read() as connection:
        namespaces = sections.read_namespaces(connection, scope)
        history = read_history(connection, scope)
        evicted = read_evictions(connection, scope)
        written = read_wear(connection, scope)
        used_bytes = store.limit.used(connection)
    if scope.namespace_id is not None and not namespaces:
        raise UsageError(
            f"There is no namespace {scope.namespace_id}; kvdb ls namespaces lists them."
        )
    names = {namespace.id: sections.namespace_name(namespace) for namespace in namespaces}
    blocks = read_blocks(store.database, scope.namespace_id)

    made: list[Section] = []
    if history is None:
        made.append(sections.NO_REQUESTS)
    else:
        made.append(sections.tokens_section(history))
        made.append(sections.seconds_section(history))
        made.append(sections.tenants_section(history))
    made.append(sections.capacity_section(namespaces, used_bytes, store.limit.max_bytes))
    if len(blocks):
        tree = prefix_tree(blocks)
        counts = age_and_heat(blocks, store.environment.now_us())
        made.append(sections.blocks_section(blocks, counts))
        with store.database.read() as connection:
            beginnings = read_beginnings(connection, tree.boxes, decoder)
        made.append(sections.tree_section(tree, names, beginnings))
    made.append(sections.evictions_section(evicted))
    made.append(sections.wear_section(written))
    misses = costliest_misses(store.database, scope, explainer(store, decoder))
    made.append(sections.misses_section(misses, names))
    held = sum(namespace.live_blocks for namespace in namespaces)
    tiles = sections.head_tiles(history, held, used_bytes)
    return render(Page("What this store saves", _subtitle(store, scope, history), tiles, made))


def _subtitle(store: Store, scope: Scope, history: History | None) -> str:
    requests = "No requests"
    if history is not None:
        first, last = words.day(history.first_us), words.day(history.last_us)
        span = first if first == last else f"{first} to {last}"
        requests = f"{words.plural(history.total.requests, 'request')}, {span}"
    if scope.since_us is not None:
        requests += f", since {words.moment(scope.since_us)}"
    if scope.tenant is not None:
        requests += f", only tenant {words.shown(scope.tenant)}"
    if scope.namespace_id is not None:
        requests += f", only namespace {scope.namespace_id}"
    return f"{requests}. Store {store.path}. Times are UTC; blocks and sizes as of " + (
        f"{words.moment(store.environment.now_us())}."
    )
