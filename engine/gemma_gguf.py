"""gguf2mlx for the text models of Gemma 3: ``python -m engine.gemma_gguf`` takes its options.

gguf2mlx 2.2 calls every GGUF of this family multimodal, and leaves the norms of queries and keys
as llama.cpp stores them, one more than mlx-lm's.
"""

from __future__ import annotations

import re
from typing import Any

QUERY_KEY_NORM = re.compile(r"blk\.\d+\.attn_[qk]_norm\.weight")


def main() -> None:
    import gguf2mlx.gguf2mlx as converter
    from gguf2mlx import vlm

    vlm.VLM_ARCHITECTURES.discard("gemma3")
    known = converter._restore_architecture_tensor

    def restore(name: str, array: Any, architecture: str) -> Any:
        array = known(name, array, architecture)
        return array - 1 if QUERY_KEY_NORM.fullmatch(name) else array

    converter._restore_architecture_tensor = restore
    converter.main()


if __name__ == "__main__":
    main()
