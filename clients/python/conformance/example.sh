#!/bin/sh
# Run the example NAME against TARGET; from the repository's root.
set -eu
python=.venv/bin/python
[ -x "$python" ] || python=${PYTHON:-python3}
PYTHONPATH=clients/python/src exec "$python" "clients/python/examples/$1.py" "$2"
