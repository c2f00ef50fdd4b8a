#!/bin/sh
# Run the conformance program; from the repository's root.
exec java -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Xss512k \
  -cp "build/java/classes:build/java/test-classes:$(cat build/java/classpath)" Conformance
