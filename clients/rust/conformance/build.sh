#!/bin/sh
# Build the Rust client with its conformance program into build/rust, and compile what its documentation shows; run from the
# repository's root.
set -eu
CARGO_TARGET_DIR=$PWD/build/rust
export CARGO_TARGET_DIR
export CARGO_PROFILE_DEV_DEBUG=0 # nobody debugs it, and it builds sooner
cargo build --quiet --locked --manifest-path clients/rust/Cargo.toml --examples
cargo test --quiet --locked --manifest-path clients/rust/Cargo.toml -p mlx-stream-client --doc
