"""The tokenizer of a model without the model: text to ids with offsets, ids to text, chats to text.

transformers decides what a model's tokenizer is, and takes two seconds to import. So what it made
of a model's files is remembered in the cache folder: the engine leaves it there, and whoever comes
later loads it in a tenth of a second. Imports no MLX, and no transformers where it is remembered.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.answers.style import AnswerStyle, infer_style
from engine.folders import cache_folder, private_folder
from engine.prompt.template import ChatTemplate
from engine.prompt.tools import chat_template
from kvdb.errors import ModelError, PromptError

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

    from kvdb.store import Store

FORMAT = 2
# All that transformers may read; what a file is called is part of what it means.
FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
)
TEMPLATE_FOLDERS = ("additional_chat_templates",)


@dataclass(frozen=True, slots=True)
class PromptTokenizer:
    """``template`` is None for a model without one, or with one that only its own code renders.
    ``digest``, 32 bytes, is that of all that makes ids of a text."""

    backend: Tokenizer
    template: ChatTemplate | None
    bos: str | None
    style: AnswerStyle
    digest: bytes

    def encode(self, text: str, *, special: bool) -> Encoding:
        """Ids and character offsets; with ``special`` also the tokens put around a plain text.
        Raises PromptError for text that is not Unicode."""
        try:
            return self.backend.encode(text, add_special_tokens=special)
        except (UnicodeEncodeError, TypeError) as error:
            raise PromptError("The prompt holds bytes that are not valid text.") from error

    def encode_text(self, text: str) -> Encoding:
        """A plain text as prompt: with a start token, unless it brings its own."""
        return self.encode(text, special=self.bos is None or not text.startswith(self.bos))

    @property
    def longest(self) -> int | None:
        """The most characters that one token can stand for; None where text is normalised first."""
        if self.backend.normalizer is not None:
            return None
        return max(map(len, self.backend.get_vocab()), default=1)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special ones too. Unknown ids have none."""
        return str(self.backend.decode(list(map(int, ids)), skip_special_tokens=False))


def adopt(tokenizer: Any) -> PromptTokenizer | None:
    """What mlx-lm or transformers loaded, as a PromptTokenizer; None for one that is not of the
    tokenizers library."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if type(backend).__module__.partition(".")[0] != "tokenizers":
        return None
    style = answer_style(tokenizer)
    template = None
    source = template_source(tokenizer)
    if source is not None:
        specials = json.loads(json.dumps(dict(tokenizer.special_tokens_map), default=str))
        # mlx-lm tells the template of a model that thinks to let it.
        template = chat_template(source, specials, style.thinking is not None)
    digest = hashlib.sha256(backend.to_str().encode()).digest()
    return PromptTokenizer(backend, template, tokenizer.bos_token, style, digest)


def answer_style(tokenizer: Any) -> AnswerStyle:
    """The style of the answers of a model whose tokenizer mlx-lm or transformers loaded."""
    source = template_source(tokenizer)
    return infer_style(
        getattr(tokenizer, "chat_template", None),
        tokenizer.get_vocab(),
        getattr(tokenizer, "init_kwargs", {}),
        own_tools=source is not None and not chat_template(source, {}, False).has_tools,
    )


def template_source(tokenizer: Any) -> str | dict[str, str] | None:
    """The chat template, or several by name, of a tokenizer that mlx-lm or transformers loaded;
    None without one or with one that is code."""
    custom = "chat_template_type" in getattr(tokenizer, "init_kwargs", {})
    return None if custom else getattr(tokenizer, "chat_template", None)


def remember(folder: Path, tokenizer: PromptTokenizer) -> None:
    """Keep what ``folder``'s tokenizer is for the next process; failure is no error."""
    path = _memory(folder)
    if path.exists():
        return
    template = tokenizer.template
    own = tokenizer.backend.to_str()
    document = {
        "bos": tokenizer.bos,
        "digest": tokenizer.digest.hex(),
        "style": asdict(tokenizer.style),
        "backend": None if _same(folder, own) else own,
        "template": None
        if template is None
        else {
            "source": template.source,
            "specials": template.specials,
            "thinking": template.thinking,
        },
    }
    try:
        private_folder(path.parent)
        descriptor, name = tempfile.mkstemp(prefix=".tokenizer-", dir=path.parent)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(document, file)
        Path(name).replace(path)
    except (OSError, ValueError):
        return


def _same(folder: Path, own: str) -> bool:
    """Is it just what the model's tokenizer.json says?"""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    return path.exists() and bool(Tokenizer.from_file(str(path)).to_str() == own)


def load_tokenizer(folder: Path) -> PromptTokenizer:
    """The tokenizer of the model in ``folder``. Raises ModelError when it has none that can be
    used without running its code."""
    remembered = _recall(folder)
    if remembered is not None:
        return remembered
    tokenizer = adopt(_ask_transformers(folder))
    if tokenizer is None:
        raise ModelError(f"The tokenizer of the model in {folder} only works in its own code.")
    remember(folder, tokenizer)
    return tokenizer


def _recall(folder: Path) -> PromptTokenizer | None:
    from tokenizers import Tokenizer

    try:
        document = json.loads(_memory(folder).read_text("utf-8"))
        backend = document["backend"]
        made = (
            Tokenizer.from_file(str(folder / "tokenizer.json"))
            if backend is None
            else Tokenizer.from_str(backend)
        )
        template = document["template"]
        chat = None if template is None else chat_template(**template)
        style = dict(document["style"])
        style["thinking"] = style["thinking"] and tuple(style["thinking"])
        digest = bytes.fromhex(document["digest"])
        return PromptTokenizer(made, chat, document["bos"], AnswerStyle(**style), digest)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise ModelError(f"The tokenizer in {folder} cannot be read: {error}.") from error


def _ask_transformers(folder: Path) -> Any:
    if not any((folder / name).exists() for name in FILES if name.startswith("tokenizer")):
        raise ModelError(f"The model in {folder} has no tokenizer.")
    # It would tell every user on stderr that PyTorch is missing, which nothing here needs.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ModelError(
            "Reading this model's tokenizer for the first time needs transformers, which is not "
            "installed."
        ) from error
    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # whatever transformers and tokenizers make of bad files
        reason = " ".join(str(error).split()) or repr(error)
        raise ModelError(f"The tokenizer in {folder} cannot be loaded: {reason[:300]}") from error


def _memory(folder: Path) -> Path:
    """Where the tokenizer of ``folder`` is remembered as long as none of its files changes."""
    digest = hashlib.sha256(f"format {FORMAT}\n".encode())
    for package in ("transformers", "tokenizers"):
        try:
            digest.update(f"{package} {version(package)}\n".encode())
        except ModuleNotFoundError:  # then it is not what decides
            continue
    paths = [folder / name for name in FILES]
    paths += [path for name in TEMPLATE_FOLDERS for path in sorted((folder / name).glob("*"))]
    for path in paths:
        try:
            status = path.stat()
        except OSError:
            continue
        signature = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        digest.update(f"{path.name} {signature} {status.st_ctime_ns}\n".encode())
    return cache_folder() / "tokenizers" / f"{digest.hexdigest()[:32]}.json"


# -- from a store --------------------------------------------------------------------------------


def namespace_tokenizer(store: Store, namespace_id: int) -> PromptTokenizer | None:
    """The tokenizer of the model that a namespace belongs to, where the model is still in the
    folder of that name and is the same."""
    from engine.fingerprint import DigestMemory
    from engine.models import find_local
    from kvdb import index

    with store.database.read() as connection:
        record = index.namespace_record(connection, namespace_id)
    folder = find_local(record.model)
    if folder is None:
        return None
    try:
        if DigestMemory(cache_folder()).digest(folder / "config.json") != record.identity.config:
            return None
        return load_tokenizer(folder)
    except (OSError, ModelError):
        return None


def namespace_decoder(store: Store, namespace_id: int) -> Callable[[Sequence[int]], str] | None:
    """Token ids of a namespace to text; None where its tokenizer is not to be had."""
    tokenizer = namespace_tokenizer(store, namespace_id)
    return None if tokenizer is None else tokenizer.decode
