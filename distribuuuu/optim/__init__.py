"""Optimization.

- optimizer.py: OPTIM.NAME (SGD, the registry OPTIMIZERS, timm), learning rate by batch size, gradient clipping
- param_groups.py: weight decay and learning-rate factor of each parameter
- schedules.py: the learning rate as a function of the epoch, and its registry SCHEDULES
- ema.py: exponential moving average of the weights
- precision.py: autocast and loss scaling

A new optimizer or schedule is one new file here, or a decorated function in your own script: see optimizer.py and
schedules.py.
"""
