"""One decode step, measured apart from everything around it."""
