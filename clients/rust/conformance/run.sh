#!/bin/sh
# Run the conformance program; from the repository's root.
exec "build/rust/${RUST_BUILD:-debug}/examples/conformance"
