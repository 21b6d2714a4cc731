"""Data loading: data sets, samplers, decoding, transforms, augmentation, mixup, workers. Entry: loader.build_loader."""
