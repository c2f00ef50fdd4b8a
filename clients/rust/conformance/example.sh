#!/bin/sh
# Run the example NAME against TARGET; from the repository's root.
exec "build/rust/debug/examples/$1" "$2"
