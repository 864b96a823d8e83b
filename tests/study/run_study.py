"""A study of the tiny setting with the fake program, in a process of its own: `run_study.py FOLDER JOBS`."""

import sys
from pathlib import Path

from study_fakes import Study, tiny

from compactionrl.study import runner
from compactionrl.study.grid import grid

if __name__ == "__main__":
    runner.POLL = 0.005
    study = Study(Path(sys.argv[1]), grid([tiny()], 2, extra=False), keep_plan=True)
    with runner.alone(study.runs):
        print("holds the folder", flush=True)
        study.run(int(sys.argv[2]))
