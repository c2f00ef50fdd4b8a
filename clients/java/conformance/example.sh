#!/bin/sh
# Run the example NAME against TARGET; from the repository's root.
name=$(printf '%s' "$1" | cut -c1 | tr '[:lower:]' '[:upper:]')$(printf '%s' "$1" | cut -c2-)
exec java -XX:+UseSerialGC -XX:TieredStopAtLevel=1 \
  -cp "build/java/classes:build/java/test-classes:$(cat build/java/classpath)" "$name" "$2"
