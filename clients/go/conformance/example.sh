#!/bin/sh
# Run the example NAME against TARGET; from the repository's root.
exec "build/go/$1" "$2"
