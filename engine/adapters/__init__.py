"""LoRA adapters mounted through a graph's named targets. Empty until the feature is built."""
