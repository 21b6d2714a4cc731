"""Tasks: losses, metrics, distillation, classification."""
