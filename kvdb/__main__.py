"""``python -m kvdb``."""

from kvdb.cli import cli

if __name__ == "__main__":
    cli(prog_name="kvdb")
