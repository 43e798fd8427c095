"""Samples, from their text on disk to a batch on the device: corpus, tokenizers, packing and cache are put together in
text; then samples, order and batches. Start with samples.py."""
