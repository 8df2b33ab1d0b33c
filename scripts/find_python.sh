#!/bin/sh
# Print a Python interpreter that can build weft: $PYTHON if it is set, else the first that fits.
# What an interpreter lacks goes to stderr, in one line each.
set -u

if [ -n "${PYTHON:-}" ]; then
    candidates=$PYTHON
else
    candidates="python3 python3.12 python3.11 python3.13"
fi

complaints=""
for candidate in $candidates; do
    lack=$("$candidate" - 2>/dev/null <<'EOF'
import importlib.util
import pathlib
import sys
import sysconfig

version = "%d.%d" % sys.version_info[:2]
if sys.version_info < (3, 11):
    print("is Python %s; weft needs 3.11 or newer" % version)
elif not all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")):
    print("cannot create environments; install its venv package (Debian, Ubuntu: python3-venv)")
elif not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists():
    print("has no C headers; install its development package (Debian, Ubuntu: python3-dev)")
EOF
    ) || continue
    if [ -z "$lack" ]; then
        command -v "$candidate"
        exit 0
    fi
    complaints="$complaints
  $candidate $lack"
done

if [ -z "$complaints" ]; then
    complaints="
  none of these runs: $candidates"
fi
echo "No usable Python. Install one, or name one: make PYTHON=/path/to/python3.12$complaints" >&2
exit 1
