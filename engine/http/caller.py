"""Who asks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, as access found it. A tenant's key speaks for its tenant only, and gives its state
    a ``salt``; the main key (no tenant) may name one. ``overview`` lets it see the figures of all
    tenants."""

    tenant: str = ""
    inference: bool = True
    overview: bool = False
    admin: bool = False
    salt: bytes = b""
    key_id: int | None = None
