"""Measurement of the images of a data set, shared by the commands doctor and split."""
