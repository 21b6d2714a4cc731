"""Packed data sets, in a folder or at a URL.

- format.py: the index, the shards, and the order in which a pack at a URL is read.
- dataset.py: the data set `packed`; remote.py: byte ranges of a pack at a URL; cache.py: their copies on disk;
  store.py: requests through obstore, in a process of its own.
"""
