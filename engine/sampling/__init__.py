"""Turns logits into token ids: keys, filters, and the row-wise choice. No global random state."""
