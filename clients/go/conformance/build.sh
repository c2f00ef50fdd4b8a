#!/bin/sh
# Build the program of the Go client, and check the client, its examples and what its README shows.
# clients/conformance/README.md says what the program does. Run from the repository's root.
set -eu
mkdir -p build/go
build=$PWD/build/go
cd clients/go
go vet ./...
go test .
awk '/^```go$/ { shown = 1; next } /^```$/ && shown { exit } shown' README.md >"$build/readme.go"
printf '{"Replace": {"%s": "%s"}}' "$PWD/examples/readme/main.go" "$build/readme.go" >"$build/overlay.json"
go build -overlay "$build/overlay.json" -o "$build/readme" ./examples/readme
exec go build -o ../../build/go/ ./conformance ./examples/...
