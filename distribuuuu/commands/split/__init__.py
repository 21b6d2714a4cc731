"""Splits of a folder of images into lists."""
