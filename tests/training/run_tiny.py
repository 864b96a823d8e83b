"""A tiny run in a process of its own: `run_tiny.py FOLDER STEPS [--resume]`."""

import sys
from pathlib import Path

from training_tasks import tiny_config

from compactionrl.training.trainer import Trainer

folder, steps, *rest = sys.argv[1:]
Trainer(tiny_config(Path(folder), train__steps=int(steps)), resume="--resume" in rest).run()
