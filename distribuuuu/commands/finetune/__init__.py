"""Fine-tuning of a published backbone on images of one's own, and features of images."""
