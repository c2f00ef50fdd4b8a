"""What a model is on disk: configuration, weights, tokenizer, chat template, identity, and where models come from.

Only `weights` and `gguf_blocks` compute with mlx; everything else reads headers and text, and never imports it.
"""
