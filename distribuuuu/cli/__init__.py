"""The console commands. They import torch only when a command needs it."""
