"""Data loading: data sets, decoding, transforms, samplers, workers."""
