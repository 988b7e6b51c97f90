"""Token ids as text, with the tokenizers of the models that a store's namespaces name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from kvdb.errors import KvdbError
from kvdb.functions import TokenText

Decoder = Callable[[Sequence[int]], str]


def token_decoders(path: Path) -> Callable[[int], Decoder | None]:
    """Namespace id → what decodes its tokens; None where its tokenizer is not to be had. Each is
    loaded when it is first asked for, and kept."""

    @cache
    def decoder(namespace_id: int) -> Decoder | None:
        import kvdb
        from kvdb.sandbox.memory import unbounded_memory

        try:
            with unbounded_memory():
                from engine.prompt.tokenizer import namespace_decoder

                with kvdb.open(path, read_only=True) as store:
                    return namespace_decoder(store, namespace_id)
        except (ImportError, KvdbError):  # no engine here, or no such namespace
            return None

    return decoder


def token_text_of(path: Path) -> TokenText:
    """``token_text()`` of a store. Without a namespace it decodes where the store has one model."""
    decoder = token_decoders(path)

    def only_namespace() -> int | None:
        import kvdb

        with kvdb.open(path, read_only=True) as store:
            namespaces = store.namespaces()
        return namespaces[-1].id if len({n.model for n in namespaces}) == 1 else None

    def token_text(namespace_id: int | None, ids: Sequence[int]) -> str | None:
        if namespace_id is None:
            namespace_id = only_namespace()
        decode = None if namespace_id is None else decoder(namespace_id)
        return None if decode is None else decode(ids)

    return token_text
