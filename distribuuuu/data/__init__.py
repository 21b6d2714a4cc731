"""Data loading: from a config to normalized batches on the device.

- loader.py: start reading here. `build_loader` assembles the other files of this list in their order.
- datasets/ and packed/: images by index. samplers.py, batch_plan.py: those of a step. seeding.py: random numbers.
- build_transform.py: crops, views and stages from a config.
- samples.py: an image read, decoded (decode.py), cropped (transforms.py) and augmented (augment.py).
- image_file.py, jpeg_header.py: files and headers before they are decoded. optional_decoders.py: JPEG decoders of
  optional packages. raster.py: images of other channels or depths than 8-bit RGB.
- randaugment.py: RandAugment as in big_vision.
- workers.py: processes or threads that make batches ahead; batch.py: the batches.
- in_memory_loader.py: a data set on the device instead.
- normalize.py: mean and std, on the device. mixup.py: mixup and cutmix.

To add an augmentation, add one file to this folder with a function from uint8 (3, H, W) to the same, decorated with
`@AUGMENTATIONS.register`; AUG.OPERATIONS names it. It may draw from the global generators of torch, numpy and Python,
which are seeded for each image.
"""
