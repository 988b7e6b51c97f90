"""What an explanation says."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Explanation:
    """How much of a prompt is stored, where that ends, why, and what to do about it.

    ``code`` names the cause in short (``tools_reordered``, ``evicted``); ``diagnosis`` and
    ``advice`` are a sentence each. ``differing_token`` is the index of the first token that the
    stored neighbour has not, None where nothing stored could be compared; ``where`` is the part of
    the prompt it lies in. The two texts are what surrounds it on either side, the difference
    between ``»`` and ``«``. ``saving_tokens`` would have hit without the cause, and
    ``saving_seconds`` is that at the prefill speed measured in the namespace, None where none was.
    ``neighbour`` is what the prompt was compared to: a request, or a block's hash. ``remote`` says
    what a past request had of a remote.
    """

    prompt_tokens: int
    hit_tokens: int
    code: str
    diagnosis: str
    advice: str
    differing_token: int | None = None
    where: str | None = None
    stored_text: str | None = None
    prompt_text: str | None = None
    saving_tokens: int = 0
    saving_seconds: float | None = None
    neighbour: str | None = None
    remote: str | None = None

    def lines(self) -> list[str]:
        """The explanation for people."""
        lines = [f"{self.hit_tokens:,} of {self.prompt_tokens:,} prompt tokens hit."]
        if self.differing_token is not None:
            place = f" in {self.where}" if self.where else ""
            lines.append(f"It stops at token {self.differing_token:,}{place}.")
        elif self.where:
            lines.append(f"It stops in {self.where}.")
        if self.neighbour:
            lines.append(f"Compared with {self.neighbour}.")
        if self.stored_text is not None:
            lines.append(f"  stored: {self.stored_text}")
        if self.prompt_text is not None:
            lines.append(f"  prompt: {self.prompt_text}")
        lines.append(f"Why: {self.diagnosis}")
        if self.advice:
            lines.append(f"Advice: {self.advice}")
        if self.remote:
            lines.append(f"Remote: {self.remote}")
        if self.saving_tokens:
            time = "" if self.saving_seconds is None else f", {self.saving_seconds:.1f} s"
            lines.append(f"It would save about {self.saving_tokens:,} tokens{time}.")
        return [_one_line(line) for line in lines]  # a tool may be named anything

    def as_dict(self) -> dict[str, Any]:
        """The explanation for JSON."""
        return asdict(self)


def _one_line(text: str) -> str:
    """Printable on one line: what a terminal would act on is shown escaped."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )
