#!/bin/sh
# Run the example NAME against TARGET; from the repository's root.
exec node "build/typescript/dist/examples/$1.js" "$2"
