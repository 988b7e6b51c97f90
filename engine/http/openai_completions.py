"""``/v1/completions``: text that goes on."""

from __future__ import annotations

from fastapi import APIRouter

from engine.http.errors import route_class
from engine.http.openai_shapes import openai_error

router = APIRouter(prefix="/v1", tags=["OpenAI"], route_class=route_class(openai_error))
