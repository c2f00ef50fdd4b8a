"""What each language's client costs: messages per second, and what it adds to the way of a first text."""
