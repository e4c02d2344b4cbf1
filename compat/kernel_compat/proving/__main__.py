"""``python -m kernel_compat.proving``: prove the pickled class, config and choice of cases on stdin; the proof's JSON goes to stdout."""

from __future__ import annotations

import json
import os
import pickle
import sys

from .cases import QUICK
from .outcomes import PADDING_FREE
from .proof import prove_config


def main() -> None:
    """Prove the class, with other output sent to stderr."""
    with os.fdopen(os.dup(1), "w") as result:
        os.dup2(2, 1)
        model_class, config, padding_free = pickle.load(sys.stdin.buffer)
        cases = (PADDING_FREE,) if padding_free else QUICK
        json.dump(prove_config(config, model_class, cases).to_json(), result)


if __name__ == "__main__":
    main()
