"""Measurement of the images of a data set, and their splits, shared by the commands doctor, split and finetune."""
