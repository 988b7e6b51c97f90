"""`kvdb serve` whose answers are dictated: ``scripted_serve.py ANSWERS IDS serve …``.

ANSWERS is a JSON file; the answer to a chat with n answers in it is the n-th. The token ids of each
prompt, as they are sent to the model, are appended to the file IDS. All else is the program.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from engine import Request, blas

blas.preload()  # before anything here imports mlx.core

from engine.http import service  # noqa: E402
from engine.worker import Worker  # noqa: E402
from kvdb.__main__ import main  # noqa: E402
from tests.http.scripts import Script  # noqa: E402


def play(folder: Path, answers: list[str], ids: Path) -> None:
    script = Script(folder)

    def adapt(request: Request) -> Request:
        said = sum(message["role"] == "assistant" for message in request.messages or ())
        script.text = answers[said]
        return script(request)

    class Scripted(service.Service):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, adapt=adapt)

    encode = Worker.encode

    def encode_and_tell(worker: Worker, request: Request) -> Any:
        prompt = encode(worker, request)
        with ids.open("a") as told:
            told.write(json.dumps([int(token) for token in prompt.tokens]) + "\n")
        return prompt

    service.Service = Scripted  # type: ignore[misc]
    Worker.encode = encode_and_tell  # type: ignore[method-assign]


if __name__ == "__main__":
    answers, ids = Path(sys.argv[1]), Path(sys.argv[2])
    known = json.loads(answers.read_text())
    play(Path(known["model"]), known["answers"], ids)
    sys.argv[1:] = sys.argv[3:]
    main()
