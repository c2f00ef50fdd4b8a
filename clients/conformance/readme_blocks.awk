# Writes each block of a language in a README into a file of its own, for its compiler to judge.
# awk -v language=ts -v path=build/readme_ -v suffix=.ts [-v head=… -v tail=…] -f readme_blocks.awk README.md
# In `head`, which stands before each block as `tail` stands behind it, # is the number of the block.
$0 == "```" language {
  file = path (count += 1) suffix
  start = head
  gsub(/#/, count, start)
  print start > file
  inside = 1
  next
}
$0 == "```" && inside { print tail > file; close(file); inside = 0 }
inside { print > file }
END { if (!count) { print FILENAME ": no block of " language > "/dev/stderr"; exit 1 } }
