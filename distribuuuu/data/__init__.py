"""Data: from a config to normalized batches on the device; start reading at `loader.build_loader`.

To add an augmentation, add one file to this folder with a function from uint8 (3, H, W) to the same, decorated with
`@AUGMENTATIONS.register`; AUG.OPERATIONS names it. It may draw from the global generators of torch, numpy and Python,
which are seeded for each image.
"""
