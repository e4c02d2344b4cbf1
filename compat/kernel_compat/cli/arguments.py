"""Arguments that several commands share."""

from __future__ import annotations

import argparse
import json
import os

__all__ = ["MODEL_HELP", "BadArgumentsError", "add_json", "model_type"]

MODEL_HELP = "a model type, or a folder with a config.json"


class BadArgumentsError(Exception):
    """Arguments that can't be combined, or that name something that doesn't exist."""


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--json``."""
    parser.add_argument("--json", action="store_true", help="print JSON on stdout, and nothing else")


def model_type(model: str) -> str:
    """The model type of an argument ``--model``, which is a model type or a folder.

    Raises:
        BadArgumentsError: the argument is empty, a path that is no folder, or a folder without a config.json with a model type.
    """
    if not model.strip():
        raise BadArgumentsError(f"--model takes {MODEL_HELP}, and is empty")
    if not os.path.isdir(model):
        if any(separator in model for separator in ("/", os.sep)):
            raise BadArgumentsError(f"--model {model}: there is no such folder, and a model type has no {os.sep!r}")
        return model
    try:
        with open(os.path.join(model, "config.json"), encoding="utf-8") as file:
            config = json.load(file)
        name = str(config["model_type"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise BadArgumentsError(f"--model {model}: no model type in its config.json ({error})") from None
    return f"{name} (code of its own)" if "auto_map" in config else name  # a name that no table has
