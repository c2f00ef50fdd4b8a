"""What choosing tokens costs, as a share of a step."""
