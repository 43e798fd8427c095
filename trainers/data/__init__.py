"""Samples, from their text on disk to a batch on the device. Start with samples.py; the order of the way is corpus,
tokenizers, packing, cache, text (which puts these four together), samples, order, batches."""
