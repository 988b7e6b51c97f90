"""Why a prompt and the stored chain nearest to it part where they do. Pure: no store, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvdb.explain import texts
from kvdb.explain.case import Case, Neighbour, part_at, part_start
from kvdb.identity import Tokens
from kvdb.segments import Segment

CONTENT = ("system", "message")
AROUND = 12
THINKING = ("<think>", "</think>", "<|channel>", "<longcat_think>")


@dataclass(frozen=True, slots=True)
class Cause:
    """``code`` as in kvdb.explain.wording, with what its sentences are filled with."""

    code: str
    where: str | None
    facts: dict[str, object]


@dataclass(frozen=True)
class Sides:
    """Prompt and stored chain at their first differing token."""

    case: Case
    neighbour: Neighbour

    @property
    def at(self) -> int:
        return self.neighbour.shared

    @property
    def parts(self) -> Sequence[Segment]:
        return self.case.segments

    @property
    def stored_parts(self) -> Sequence[Segment]:
        return self.neighbour.segments

    def decode(self, tokens: Tokens) -> str:
        return "" if self.case.decode is None else self.case.decode(tokens.tolist())

    def texts(self) -> tuple[str, str]:
        """The texts of the two parts that the difference lies in, as far as they are known."""
        prompt, stored = self.case.tokens, self.neighbour.tokens
        begin, end = _bounds(self.parts, self.at, len(prompt))
        stored_end = _bounds(self.stored_parts, self.at, len(stored))[1]
        if self.in_answer:
            begin = self.neighbour.prompt_tokens or begin
            stored_end = len(stored)
        elif not self.stored_parts:
            stored_end = min(len(stored), self.at + (end - self.at) * 2 + AROUND)
        return self.decode(prompt[begin:end]), self.decode(stored[begin:stored_end])

    @property
    def in_answer(self) -> bool:
        """Does the stored side differ in what the model generated?"""
        count = self.neighbour.prompt_tokens
        return count is not None and self.at >= count

    def around(self, tokens: Tokens) -> str | None:
        """The text around the difference, the differing token marked."""
        if self.case.decode is None:
            shown = tokens[max(0, self.at - 4) : self.at + 5].tolist()
            marked = min(self.at, 4)
            shown[marked : marked + 1] = [f"»{token}«" for token in shown[marked : marked + 1]]
            return " ".join(map(str, shown))
        stop = self.at + 1
        middle = self.decode(tokens[self.at : stop])
        while "\ufffd" in middle and stop < min(len(tokens), self.at + 4):
            stop += 1  # a character may take several tokens
            middle = self.decode(tokens[self.at : stop])
        left = self.decode(tokens[max(0, self.at - AROUND) : self.at])
        right = self.decode(tokens[stop : stop + AROUND])
        return f"{left}»{middle}«{right}"


def _bounds(parts: Sequence[Segment], at: int, length: int) -> tuple[int, int]:
    index = part_at(parts, at)
    if index is None:
        return (parts[-1].end if parts and parts[-1].end <= at else 0), length
    return part_start(parts, index), parts[index].end


def find_cause(sides: Sides) -> Cause:
    """Why the two part. What is proven by content goes before what is read from the text."""
    index = part_at(sides.parts, sides.at)
    part = None if index is None else sides.parts[index]
    where = _where(sides, part)
    if sides.at >= len(sides.neighbour.tokens):
        return Cause("new_content", where, {})
    if sides.in_answer:
        return Cause(_answer(sides, part), where, {})
    tools = _tools(sides, part, where)
    if tools is not None:
        return tools
    stored_index = part_at(sides.stored_parts, sides.at)
    stored = None if stored_index is None else sides.stored_parts[stored_index]
    prompt_text, stored_text = sides.texts()
    if part is not None and stored is not None and _same_content(part, stored):
        json = texts.same_letters(prompt_text, stored_text) and texts.looks_like_json(prompt_text)
        return Cause("keys_reordered" if json else "rerendered", where, {})
    by_text = _by_text(prompt_text, stored_text)
    if by_text is not None:
        return Cause(by_text, where, {})
    if part is not None and stored is not None and index is not None and stored_index is not None:
        moved = _moved(sides.parts[index:], sides.stored_parts[stored_index:])
        if moved is not None:
            return Cause(moved[0], where, {"count": moved[1]})
    return Cause(_changed(sides, index), where, {})


def _by_text(prompt: str, stored: str) -> str | None:
    if not prompt or not stored:
        return None
    code = texts.volatile(prompt, stored)
    if code is not None:
        return code
    if texts.only_whitespace(prompt, stored):
        return "whitespace"
    if texts.same_letters(prompt, stored) and texts.looks_like_json(prompt):
        return "keys_reordered"
    return None


def _same_content(part: Segment, stored: Segment) -> bool:
    return (
        part.kind in CONTENT
        and part.digest is not None
        and (part.kind, part.digest) == (stored.kind, stored.digest)  # the role is content too
    )


def _answer(sides: Sides, part: Segment | None) -> str:
    """The chat goes on, but not with the very tokens that the model had generated."""
    if part is None or part.role not in (None, "assistant"):
        return "new_content"
    prompt, stored = sides.texts()
    if not prompt or not stored:
        return "answer_changed"
    shorter = min(len(prompt), len(stored))
    if prompt[:shorter] == stored[:shorter]:
        return "retokenized"
    if any(tag in stored or tag in prompt for tag in THINKING):
        return "rerendered"
    by_text = _by_text(prompt, stored)
    return by_text or "answer_changed"


def _tools(sides: Sides, part: Segment | None, where: str | None) -> Cause | None:
    """What happened to the tools, when that is where the prompts part."""
    mine = [part for part in sides.parts if part.kind == "tool"]
    theirs = [part for part in sides.stored_parts if part.kind == "tool"]
    if not sides.stored_parts or not (mine or theirs):
        return None
    index = part_at(sides.stored_parts, sides.at)
    stored = None if index is None else sides.stored_parts[index]
    digests, stored_digests = ([tool.digest for tool in tools] for tools in (mine, theirs))
    kinds = (part and part.kind, stored and stored.kind)
    # Templates write the tools into the system prompt, or say something else when there are some.
    around = "template" in kinds or (part and stored and _same_content(part, stored))
    if "tool" not in kinds and not (around and digests != stored_digests):
        return None
    if digests == stored_digests:
        prompt_text, stored_text = sides.texts()
        if texts.same_letters(prompt_text, stored_text):
            return Cause("keys_reordered", where, {})
        return Cause(_by_text(prompt_text, stored_text) or "rerendered", where, {})
    if sorted(map(str, digests)) == sorted(map(str, stored_digests)):
        return Cause("tools_reordered", where, {"count": len(mine)})
    if stored is not None and (part is None or part.kind != "tool") and stored.kind == "tool":
        where = f"{stored.title(len(theirs))} of the stored prompt"
    facts: dict[str, object] = {
        "added": len(set(digests) - set(stored_digests)),
        "removed": len(set(stored_digests) - set(digests)),
    }
    if [tool.name for tool in mine] == [tool.name for tool in theirs]:
        code = "tool_changed"
        volatile = _by_text(*sides.texts())
        if volatile in ("timestamp", "unique_id"):
            code = volatile
        return Cause(code, where, facts)
    if not facts["removed"]:
        return Cause("tools_added", where, facts)
    return Cause("tools_changed" if facts["added"] else "tools_removed", where, facts)


def _moved(parts: Sequence[Segment], stored: Sequence[Segment]) -> tuple[str, int] | None:
    """Messages that one side has and the other has not, when both go on with the same one."""
    mine = [part.digest for part in parts if part.kind == "message" and part.digest]
    theirs = [part.digest for part in stored if part.kind == "message" and part.digest]
    if not mine or not theirs:
        return None
    if mine[0] in theirs[1:]:
        return "messages_dropped", theirs.index(mine[0])
    if theirs[0] in mine[1:]:
        return "messages_inserted", mine.index(theirs[0])
    return None


def _changed(sides: Sides, index: int | None) -> str:
    """Other content, by where it lies: in the newest message that is what a prompt is for."""
    if index is None:
        return "text_changed"
    part = sides.parts[index]
    if part.kind == "system":
        return "system_changed"
    if part.kind == "template":
        return "template_changed" if index + 1 < len(sides.parts) else "new_content"
    if part.kind == "message":
        later = [other for other in sides.parts[index + 1 :] if other.kind == "message"]
        return "message_changed" if later else "new_content"
    return "text_changed"


def _where(sides: Sides, part: Segment | None) -> str | None:
    if part is None:
        return None
    tools = sum(other.kind == "tool" for other in sides.parts)
    title = part.title(tools)
    if part.kind != "tool" or sides.case.decode is None:
        return title
    begin, end = _bounds(sides.parts, sides.at, len(sides.case.tokens))
    text = sides.decode(sides.case.tokens[begin:end])
    path = texts.json_path(text, len(sides.decode(sides.case.tokens[begin : sides.at])))
    path = path[1:] if path[:1] == ["function"] else path
    return f"{title}: {'.'.join(path)}" if path else title
