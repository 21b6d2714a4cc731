"""Files on disk. Imports no torch.

- atomic_file.py, new_folder.py: files that are replaced whole, and folders that appear whole. locks.py: kernel locks.
- untrusted.py: input from others, within limits.
"""
