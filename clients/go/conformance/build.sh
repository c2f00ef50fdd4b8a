#!/bin/sh
# Build the program of the Go client, and check the client and its examples. clients/conformance/README.md says what the
# program does. Run from the repository's root.
set -eu
mkdir -p build/go
cd clients/go
go vet ./...
exec go build -o ../../build/go/ ./conformance ./examples/...
