"""Does this build compute the state that a namespace holds, or that another build did? One block
says."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from engine import mlxlm
from engine.live import LiveState
from engine.prefill import Prefill
from engine.storage import Storage
from kvdb.errors import StoreReadOnly
from kvdb.identity import ModelIdentity, Tokens, as_tokens, canonical_json
from kvdb.layout import Layout, TensorSpec

if TYPE_CHECKING:
    from kvdb.builds import Build
    from kvdb.match import Match, Namespace
    from kvdb.store import Store

log = logging.getLogger("kvdb.engine")

FLOAT32_TOLERANCE = 1e-3
HALF_TOLERANCE = 5e-2
ATTEMPTS = 3

# The live block nearest to a root, one with a recurrent state if there are such, and the tokens
# from the root to it. What other builds brought along is not what the namespace is about.
SHALLOWEST_CHAIN = """
WITH RECURSIVE chain (id, parent_id, depth) AS (
    SELECT id, parent_id, depth FROM (
        SELECT b.id, b.parent_id, b.depth
        FROM blocks AS b JOIN block_tokens AS t ON t.block_id = b.id
        WHERE b.namespace_id = ? AND b.state = 'live' AND length(t.extra) <= 4
            AND coalesce((SELECT verdict FROM builds WHERE id = b.build_id), 'compatible')
                = 'compatible'
        ORDER BY NOT EXISTS (SELECT 1 FROM parts WHERE block_id = b.id
            AND part >= 'state:' AND part < 'state;'), b.depth, b.token_count DESC, b.id LIMIT 1)
    UNION ALL
    SELECT b.id, b.parent_id, b.depth FROM chain JOIN blocks AS b ON b.id = chain.parent_id
)
SELECT t.tokens FROM chain LEFT JOIN block_tokens AS t ON t.block_id = chain.id ORDER BY depth
"""
VERDICT = "SELECT verdict, id FROM builds WHERE namespace_id = ? AND digest = ?"


def build_digest(description: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical_json(dict(description)).encode()).hexdigest()


def open_storage(
    store: Store,
    identity: ModelIdentity,
    layout: Layout,
    description: Mapping[str, Any],
    model: mlxlm.CountingModel,
    caches: Callable[[], list[Any]],
    *,
    name: str,
    block_tokens: int,
    salt: bytes = b"",
    tenant: str = "",
) -> Storage:
    """The namespace in which this build's state is right.

    A build that meets a namespace for the first time recomputes one of its blocks; if the two
    differ beyond rounding, the build's digest makes another namespace. Where there is nothing to
    recompute, it defines the namespace. Raises KvdbError where the store cannot be used.
    """
    digest = build_digest(description)

    def named(build: str | None) -> Namespace:
        return store.namespace(
            identity,
            layout,
            model=name,
            block_tokens=block_tokens,
            salt=salt,
            build=build,
            tenant=tenant,
        )

    namespace = named(None)
    build, verdict = _known_build(store, namespace, digest, description)
    compared = True
    if verdict == "unchecked":
        difference = _measure(store, namespace, model, caches)
        if difference is None:
            verdict = "compatible"
            compared = False
            if build is not None:
                build = store.define(build)
        else:
            verdict = "compatible" if difference <= 1 else "incompatible"
            if build is not None:
                build = store.set_verdict(build, verdict == "compatible", difference)
            log.info(
                "build %s is %s with the stored state (%.3g of the tolerance)",
                digest[:12],
                verdict,
                difference,
            )
    if verdict == "incompatible":
        namespace = named(digest)
        build, _ = _known_build(store, namespace, digest, description)
        compared = True
    return Storage(store, namespace, build, digest, compared=compared)


def _known_build(
    store: Store, namespace: Namespace, digest: str, description: Mapping[str, Any]
) -> tuple[Build | None, str]:
    try:
        build = store.build(namespace, digest, description)
    except StoreReadOnly:
        rows = store.sql(VERDICT, (namespace.id, digest)).rows
        return None, str(rows[0][0]) if rows else "unchecked"
    return build, build.verdict


def _measure(
    store: Store, namespace: Namespace, model: mlxlm.CountingModel, caches: Callable[[], list[Any]]
) -> float | None:
    """The largest difference in units of its tolerance; None where nothing is left to compare
    with. Infinite when stored state is there but cannot be read."""
    for _ in range(ATTEMPTS):
        rows = store.sql(SHALLOWEST_CHAIN, (namespace.id,), limit=100_000).rows
        if not rows:
            return None
        if any(row[0] is None for row in rows):
            return float("inf")
        if not all(row[0] for row in rows):
            return None  # imported without its tokens, on trust
        tokens = as_tokens(np.frombuffer(b"".join(bytes(row[0]) for row in rows), dtype="<u4"))
        match = store.match(namespace, tokens, share_tail=False)
        if not match.blocks or not match.blocks[-1].live:
            continue
        stored = _stored(store, match)
        if stored is None:  # damaged, and dropped by now: the next one
            continue
        if not comparable(namespace.layout, stored):
            return None
        steps = compare(namespace, tokens, match.blocks[-1].start, stored, model, caches())
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return float(end.value)
    return float("inf")


Parts = Mapping[str, npt.NDArray[np.uint8]]


def _stored(store: Store, match: Match) -> Parts | None:
    """What is stored of the last block's state; None when its required parts cannot be read."""
    block = match.blocks[-1]
    parts: dict[str, npt.NDArray[np.uint8]] = {}
    for part in match.namespace.layout.parts:
        if part.kind == "logits" or part.name not in block.parts:
            continue
        raw = store.read_part(block.parts[part.name], block)
        if raw is not None:
            parts[part.name] = raw
        elif part.required:
            return None
    return parts


def comparable(layout: Layout, names: Collection[str]) -> bool:
    """Whether parts of these names say anything of a build: token ids are the same in each."""
    parts = [layout.by_name[name] for name in names]
    return any(part.kind != "logits" and not part.is_mark for part in parts)


def compare(
    namespace: Namespace,
    tokens: Tokens,
    start: int,
    stored: Parts,
    model: mlxlm.CountingModel,
    caches: list[Any],
) -> Generator[None, None, float]:
    """Compute the block of ``tokens`` that begins at ``start``, and return how far it is from what
    is ``stored`` of it (see :func:`comparable`), in units of the tolerance. Yields between two
    steps of the model."""
    live = LiveState(namespace.layout, caches)
    for _ in Prefill(model, live, tokens, namespace.block_tokens, True).run(0, len(tokens)):
        yield
    computed = {
        part.name: live.cut(part, start, len(tokens))
        for part in namespace.layout.parts
        if part.name in stored and not part.is_mark
    }
    return _difference(namespace.layout, stored, computed, len(tokens) - start)


def _difference(layout: Layout, stored: Parts, computed: Parts, tokens: int) -> float:
    worst = 0.0
    for part in layout.parts:
        if part.name not in computed:
            continue
        layer = layout.layers[part.layers[0]]
        bits = dict(layer.attributes).get("bits")
        mine = _tensors(computed[part.name], part.tensors, len(part.layers), tokens)
        theirs = _tensors(stored[part.name], part.tensors, len(part.layers), tokens)
        if isinstance(bits, int):
            # One step of the quantiser may flip by rounding: compare values, allow a step.
            group = int(dict(layer.attributes)["group_size"] or 0)
            mine, theirs = (_dequantized(t, bits, group) for t in (mine, theirs))
            tolerance = HALF_TOLERANCE + 2 / (2**bits - 1)
        else:
            wide = all(spec.dtype == "F32" for spec in part.tensors)
            tolerance = FLOAT32_TOLERANCE if wide else HALF_TOLERANCE
        for a, b in zip(mine, theirs, strict=True):
            scale = float(mlxlm.scalar(mx.abs(a).max()))
            apart = float(mlxlm.scalar(mx.abs(a - b).max()))
            relative = apart / scale if scale else float("inf") if apart else 0.0
            # A comparison with NaN is false: such state is not compatible.
            worst = max(worst, relative / tolerance if relative == relative else float("inf"))
    return worst


def _tensors(
    raw: npt.NDArray[np.uint8], specs: Sequence[TensorSpec], layers: int, tokens: int
) -> list[mx.array]:
    """All tensors of a part, layer after layer, as float32 (packed ones as they are)."""
    arrays: list[mx.array] = []
    at = 0
    for _ in range(layers):
        for spec in specs:
            piece = raw[at : at + spec.nbytes(tokens)]
            at += len(piece)
            array = mx.array(piece.view(spec.numpy_dtype).reshape(spec.full_shape(tokens)))
            if spec.dtype == "BF16":
                array = array.view(mx.bfloat16)
            arrays.append(array if spec.dtype == "U32" else array.astype(mx.float32))
    return arrays


def _dequantized(tensors: Sequence[mx.array], bits: int, group: int) -> list[mx.array]:
    return [
        mx.dequantize(tensors[i], tensors[i + 1], tensors[i + 2], group_size=group, bits=bits)
        for i in range(0, len(tensors), 3)
    ]
