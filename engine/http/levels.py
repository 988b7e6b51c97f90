"""Who may use a route: declared by its router, administration where nothing is said."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, get_args

from fastapi import APIRouter
from starlette.routing import BaseRoute
from starlette.types import Scope

# From what anybody may see to what only the admin key may do. The overview is what a page shows:
# figures of all tenants, and no prompt.
Level = Literal["open", "inference", "overview", "administration"]
LEVELS: tuple[Level, ...] = get_args(Level)


class Router(APIRouter):
    """A router whose routes are all of one level."""

    def __init__(self, level: Level = "administration", **options: Any) -> None:
        super().__init__(**options)
        self.level: Level = level


class Rule(NamedTuple):
    """``template`` is a route's path with its parameters' names: what logs show."""

    level: Level
    template: str
    path: re.Pattern[str]
    methods: frozenset[str] | None


class Rules:
    """The levels of all routes. A path that no rule knows is administration, so that a route that
    was forgotten is closed."""

    def __init__(self, routers: Iterable[APIRouter] = ()) -> None:
        self._rules: list[Rule] = []
        for router in routers:
            self.add(router.routes, getattr(router, "level", "administration"))

    def add(self, routes: Iterable[BaseRoute], level: Level) -> None:
        """Declare routes, or mounts such as static files."""
        for route in routes:
            path, template = getattr(route, "path_regex", None), getattr(route, "path", "")
            if path is not None:  # else it is none that a request can reach by itself
                methods = getattr(route, "methods", None)
                self._rules.append(Rule(level, template, path, methods and frozenset(methods)))

    def find(self, scope: Scope) -> Rule | None:
        """The strictest rule that fits: which of several routes answers is the app's affair. With
        a method that no route has, the strictest of the path."""
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        found = [rule for rule in self._rules if rule.path.match(path)]
        answering = [r for r in found if r.methods is None or scope["method"] in r.methods]
        return max(answering or found, key=lambda rule: LEVELS.index(rule.level), default=None)
