"""``python -m kernel_compat.proving GIVEN RESULT``: prove the pickled model class and config in a process of its own."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path

from .cases import QUICK
from .proof import prove_config


def main(given: str, result: str) -> None:
    """Read the class and the config from `given`, and write the proof's JSON to `result`."""
    model_class, config = pickle.loads(Path(given).read_bytes())
    Path(result).write_text(json.dumps(prove_config(config, model_class, QUICK).to_json()))


if __name__ == "__main__":
    main(*sys.argv[1:])
