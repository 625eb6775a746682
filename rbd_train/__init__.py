"""Library and training stages of rbd_train: judges, detectors, the debias loop, distillation."""

__version__ = "0.1.0"
