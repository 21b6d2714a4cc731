"""Data sets, one family a file, and the loader that feeds the device from any of them.

A new data set is one new file here with an `ImageDataset` in it, decorated with `@DATASETS.register`; such files import
torch and torchvision inside functions only, so that a mistyped name is answered at once.
"""
