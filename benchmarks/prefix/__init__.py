"""What a kept prefix is worth: time to first token warm against cold, and how fast states are kept and found."""
