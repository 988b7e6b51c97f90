"""The query shell: SQL and commands of this domain, at a prompt or from a script.

``session`` runs what was entered, wherever it came from; ``repl`` is the prompt, ``script`` the
standard input. Statements run in a child process that can be killed (:mod:`kvdb.sandbox.child`).
"""
