#!/bin/sh
# The program of the Python client: clients/conformance/README.md says what it does. Run from the repository's root.
set -eu
python=.venv/bin/python
[ -x "$python" ] || python=${PYTHON:-python3}
PYTHONPATH=clients/python/src exec "$python" clients/python/conformance/program.py
