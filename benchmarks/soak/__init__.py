"""A server under mixed load for a long time: nothing may grow, and nobody may get anything that is not theirs."""
