#!/bin/sh
# Build the Java client with its conformance program into build/java; run from the repository's root.
set -eu
output=$PWD/build/java
stamp=$output/built
if [ -e "$stamp" ] && [ -z "$(find clients/java proto -newer "$stamp" -type f)" ]; then exit 0; fi
mkdir -p "$output/readme"
awk -v language=java -v path="$output/readme/Readme" -v suffix=.java \
  -v head='import io.mlxstream.*; final class Readme# { void block() {' -v tail='} }' \
  -f clients/conformance/readme_blocks.awk clients/java/README.md
mvn -q -B -f clients/java/pom.xml -Doutput.directory="$output" -Dmdep.outputFile="$output/classpath" \
  test-compile dependency:build-classpath
touch "$stamp"
