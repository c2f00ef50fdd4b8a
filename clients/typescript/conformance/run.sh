#!/bin/sh
# Run the conformance program; from the repository's root.
exec node build/typescript/dist/conformance/main.js
