"""The script for Slurm in docs/matrix-machines.md, as it is written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from small import PYTHON, TAG, Small
from waiting import LONG

TEXT = (Path(__file__).parents[2] / "docs" / "matrix-machines.md").read_text(encoding="utf-8")


def test_the_array_of_slurm(small: Small) -> None:
    small.write("test_it.py", "def test(): pass")
    small.commit()  # parts of one revision are one run
    small.axes(transformers=("5.0", "5.1", "5.2"))
    (script,) = re.findall(r"^```sh\n(#!/bin/bash\n#SBATCH --array.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    assert "python==3.12" in script
    script = script.replace("python==3.12", f"python=={PYTHON}")
    home = small.folder / "home"
    home.mkdir()
    (home / "project").symlink_to(small.folder)
    environment = small.environment(
        HOME=str(home), SLURM_CPUS_PER_TASK="1", SLURM_ARRAY_TASK_COUNT="2", SLURM_ARRAY_JOB_ID="7"
    )
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    for task in ("1", "2"):
        words = ["bash", "-c", script]
        subprocess.run(words, env={**environment, "SLURM_ARRAY_TASK_ID": task}, cwd="/", check=True, timeout=LONG)
    merged = small.run("merge", *map(str, sorted((home / "results").glob("*.sqlite"))))
    assert merged.returncode == 0, merged.stderr
    assert {name: result.verdict for name, result in small.results().items()} == {
        f"{TAG}-tf{minor}-torch2.11": "passed" for minor in ("5.0", "5.1", "5.2")
    }
