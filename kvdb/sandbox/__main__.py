"""The child of :class:`kvdb.sandbox.SandboxProcess`."""

import sys

from kvdb.sandbox.child import serve

serve(sys.argv[1:])
