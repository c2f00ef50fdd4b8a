#!/bin/sh
# Run the conformance program; from the repository's root.
exec build/rust/debug/examples/conformance
