#!/bin/sh
# Make a fresh virtual environment: deploy/setup/environment.sh FOLDER DEVICE
# Takes the first Python that is new enough and whole; $PYTHON, where set, is the only candidate.
set -eu
folder=$1 device=$2
incomplete=

for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python}; do
  "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
  if "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
    printf '%s\n' "Making $folder with $("$candidate" --version 2>&1) for device $device"
    rm -rf "$folder"
    exec "$candidate" -m venv "$folder"
  fi
  incomplete="$incomplete $candidate"
done

if [ -n "$incomplete" ]; then
  echo "make: Python without its venv module:$incomplete. On Debian and Ubuntu: apt install python3-venv" >&2
else
  echo "make: no Python 3.11 or newer among: ${PYTHON:-python3, python3.11 to python3.14}." \
    "Install one, or name it: make PYTHON=/path/to/python3" >&2
fi
exit 1
