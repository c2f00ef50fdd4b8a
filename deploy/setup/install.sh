#!/bin/sh
# Install into a virtual environment at the locked versions: deploy/setup/install.sh PYTHON TITLE PIP-ARGUMENT...
# Shows the large downloads and a summary of what pip prints; its errors pass through. Modules are compiled when first
# used, since most never are.
set -eu
python=$1 title=$2
shift 2

echo "Installing $title; this can take a minute or two"
{
  code=0
  "$python" -m pip install --disable-pip-version-check --no-compile --progress-bar off -c constraints.txt "$@" || code=$?
  echo "exit $code"
} | while IFS= read -r line; do
  case $line in
    'exit '[0-9]*) exit "${line#exit }" ;;
    *Downloading*' MB)'*) echo "  ${line#"${line%%[! ]*}"}" ;;
    'Installing collected packages: '*) echo "  Unpacking $(echo "${line#*: }" | wc -w | tr -d ' ') packages" ;;
  esac
done
