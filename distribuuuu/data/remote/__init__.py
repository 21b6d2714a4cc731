"""Packed data sets at a URL: byte ranges, a cache on disk, reading ahead, and uploading."""
