"""What a client hears that does not get in. One body that the clients of all dialects read."""

from __future__ import annotations

import json

from starlette.types import Scope, Send

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    503: "overloaded_error",
}


async def refuse(scope: Scope, send: Send, status: int, code: str, message: str) -> None:
    """Answer with an error and end the connection: its body may not have been read."""
    error = {"type": TYPES[status], "message": message, "code": code, "param": None}
    document = {
        "type": "error",
        "error": error,
        "request_id": scope.get("state", {}).get("request_id"),
    }
    body = json.dumps(document).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
