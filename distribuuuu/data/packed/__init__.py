"""Packed data sets, in a folder or at a URL.

- format.py: the index, the shards, and the order in which blocks of neighboring images are read.
- dataset.py: the data set `packed`; remote.py: the local copy of a pack at a URL; store.py: requests through obstore.
"""
