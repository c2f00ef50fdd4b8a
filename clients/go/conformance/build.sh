#!/bin/sh
# Build the program of the Go client: clients/conformance/README.md says what it does. Run from the repository's root.
set -eu
mkdir -p build/go
cd clients/go
exec go build -o ../../build/go/conformance ./conformance
