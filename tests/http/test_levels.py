"""Levels of routes: what is not said is closed."""

from __future__ import annotations

import pytest
from fastapi import APIRouter

from engine.http.app import ROUTERS
from engine.http.levels import LEVELS, Level, Router, Rules


def echo() -> None:
    """An endpoint."""


def router(level: Level | None, *routes: str) -> APIRouter:
    made = APIRouter() if level is None else Router(level)
    for route in routes:
        method, path = route.split(" ")
        made.add_api_route(path, echo, methods=[method])
    return made


RULES = Rules(
    (
        router("inference", "GET /a/{name}", "POST /a/{name}"),
        router("administration", "POST /a/secret"),
        router("open", "GET /open"),
        router(None, "GET /forgotten"),
        Router(),
    )
)


@pytest.mark.parametrize(
    ("method", "path", "level"),
    [
        ("GET", "/a/x", "inference"),
        ("POST", "/a/secret", "administration"),  # whichever of the two answers
        ("GET", "/a/secret", "inference"),
        ("DELETE", "/a/secret", "administration"),  # none answers
        ("GET", "/open", "open"),
        ("GET", "/open/", None),
        ("GET", "//open", None),
        ("GET", "/forgotten", "administration"),
        ("GET", "/nowhere", None),
    ],
)
def test_the_strictest_rule_holds(method: str, path: str, level: str | None) -> None:
    rule = RULES.find({"method": method, "path": path})
    assert (rule and rule.level) == level


def test_every_router_of_the_app_says_its_level() -> None:
    for one in ROUTERS:
        assert getattr(one, "level", None) in LEVELS, one.tags
