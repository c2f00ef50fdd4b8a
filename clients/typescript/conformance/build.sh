#!/bin/sh
# Build the TypeScript client with its conformance program into build/typescript; run from the repository's root.
set -eu
source=clients/typescript
output=build/typescript
mkdir -p "$output"
cp -R "$source/package.json" "$source/tsconfig.json" "$source/buf.gen.yaml" "$source/proto" "$source/conformance" "$source/examples" "$output"
rm -rf "$output/src" && mkdir -p "$output/src" && cp "$source"/src/*.ts "$output/src"
awk -v language=ts -v path="$output/examples/readme_" -v suffix=.ts \
  -f clients/conformance/readme_blocks.awk "$source/README.md"
if ! cmp -s "$source/package-lock.json" "$output/installed-lock.json"; then
  cp "$source/package-lock.json" "$output/package-lock.json"
  # On a slow network npm may give up without a word (npm/cli 9728), so what counts is what lies there.
  fetch() (cd "$output" && npm ci --no-audit --no-fund >install.log 2>&1 && test -e node_modules/.package-lock.json)
  fetch || fetch || { cat "$output/install.log"; exit 1; }
  cp "$source/package-lock.json" "$output/installed-lock.json"
fi
cd "$output" && npm run --silent build
