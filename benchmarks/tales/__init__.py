"""A tiny denoising model that makes sense: the text it learns, how it is trained, and how well it denoises."""
