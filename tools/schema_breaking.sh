#!/bin/sh
# Compare the schema with the one it must stay compatible with: BUF=path/to/buf tools/schema_breaking.sh [REVISION]
# Default: where this branch left main; on main itself, the state before the newest change to the schema.
set -eu

merge_base() {
  for name in origin/main main; do
    found=$(git merge-base HEAD "$name" 2>/dev/null) || continue
    [ "$found" = "$(git rev-parse HEAD)" ] || { echo "$found"; return; }
  done
}

skip() {
  echo "  compatibility not compared: $1"
  exit 0
}

git rev-parse --verify --quiet HEAD >/dev/null || skip 'not a git checkout'
base=${1:-$(merge_base)}
if [ -z "$base" ]; then
  newest=$(git log -1 --format=%H -- proto)
  base=$(git rev-parse --verify --quiet "$newest^") || skip 'no earlier schema in this history'
fi
[ -n "$(git ls-tree -r --name-only "$base" -- proto | grep '[.]proto$')" ] || skip 'no schema at the base revision'

before=$(mktemp -d)
trap 'rm -rf "$before"' EXIT
git archive "$base" buf.yaml proto | tar -x -C "$before"
"$BUF" breaking --against "$before"
