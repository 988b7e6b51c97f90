"""The child that runs the shell's statements: the sandbox's, and it can read tokens as text."""

import sys
from pathlib import Path

from kvdb.cli.token_text import token_text_of
from kvdb.sandbox.child import serve

if __name__ == "__main__":
    serve(sys.argv[1:], token_text_of(Path(sys.argv[1])))
