"""Files on disk: atomic writes, locks, new folders, and input from others. Imports no torch."""
