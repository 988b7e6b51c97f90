"""The program ``kvdb``, also as ``python -m kvdb``."""

import signal


def main() -> None:
    """Run the program. Until a verb runs, ^C ends it without a word: Python would show where it
    was loading."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from kvdb.cli import cli

    cli(prog_name="kvdb")


if __name__ == "__main__":
    main()
