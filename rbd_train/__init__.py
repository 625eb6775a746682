"""Library and training stages of rbd_train: judges, detectors, the debias loop, distillation."""

import os

__version__ = "0.1.0"

# TRL's trainers tell the hub what is trained on what, unless this is set before huggingface_hub is imported
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
