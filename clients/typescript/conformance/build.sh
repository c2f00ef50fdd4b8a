#!/bin/sh
# Build the TypeScript client with its conformance program into build/typescript; run from the repository's root.
set -eu
source=clients/typescript
output=build/typescript
mkdir -p "$output"
cp -R "$source/package.json" "$source/tsconfig.json" "$source/buf.gen.yaml" "$source/proto" "$source/conformance" "$source/examples" "$output"
mkdir -p "$output/src" && cp "$source"/src/*.ts "$output/src"
if ! cmp -s "$source/package-lock.json" "$output/installed-lock.json"; then
  cp "$source/package-lock.json" "$output/package-lock.json"
  (cd "$output" && npm ci --silent --no-audit --no-fund)
  cp "$source/package-lock.json" "$output/installed-lock.json"
fi
cd "$output" && npm run --silent build
