#!/bin/sh
# Write the generated code of the Rust client anew: BUF=path/to/buf clients/rust/generate.sh, from the repository's root.
# fresh.sha256 tells what it was made of, so that tests can see whether it is still fresh without a compiler.
set -eu
generated=clients/rust/src/generated
mkdir -p build/rust
"${BUF:-buf}" build proto -o build/rust/schema.binpb
CARGO_TARGET_DIR=$PWD/build/rust cargo run --quiet --locked --manifest-path clients/rust/Cargo.toml -p generate -- \
  build/rust/schema.binpb "$generated"
sha256sum proto/mlxstream/v1/*.proto "$generated/mlxstream.v1.rs" >"$generated/fresh.sha256"
