"""Files on disk: atomic writes, new folders, locks, and the boundary for untrusted files. Imports no torch."""
