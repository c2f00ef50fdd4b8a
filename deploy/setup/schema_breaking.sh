#!/bin/sh
# Compare the schema with the one it must stay compatible with: BUF=path/to/buf deploy/setup/schema_breaking.sh [REVISION]
# Default: where this branch left main; on main itself, the newest release, or before the first one the commit before.
set -eu

# Before the first release one change was not compatible: fields called "descriptor", which Java cannot hold, became
# "graph", and Java's code got a package. Nothing older is compared with.
compatible_since=0c7fba480e69cbf326498c580f88d2a51983a867

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
[ -n "$base" ] || base=$(git describe --tags --abbrev=0 --match 'v[0-9]*' HEAD 2>/dev/null) || base=HEAD~1
base=$(git rev-parse --verify --quiet "$base^{commit}") || skip 'no earlier schema in this history'
if git merge-base --is-ancestor "$base" "$compatible_since" 2>/dev/null; then base=$compatible_since; fi
[ -n "$(git ls-tree -r --name-only "$base" -- proto | grep '[.]proto$')" ] || skip 'no schema at the base revision'

before=$(mktemp -d)
trap 'rm -rf "$before"' EXIT
git archive "$base" buf.yaml proto | tar -xf - -C "$before"
"$BUF" breaking --against "$before"
