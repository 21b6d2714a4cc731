"""Data sets, one family per file; torch and torchvision are imported inside functions only, so errors come first."""
