"""The model classes that a model type has, and the classes that are proven."""

from __future__ import annotations

from typing import Any

__all__ = ["MAPPINGS", "classes_of", "model_types"]

#: transformers' mappings from model types to classes; the first that has a type gives its main class.
MAPPINGS = (
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_VISION_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_CTC_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_MAPPING_NAMES",
    "MODEL_MAPPING_NAMES",
)


def _names(mapping: str) -> dict[str, str]:
    from transformers.models.auto import modeling_auto

    return dict(getattr(modeling_auto, mapping, {}))


def model_types() -> list[str]:
    """All model types of the mappings that have a class in transformers, sorted."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    exported = set(dir(transformers))  # does not import them
    in_mappings = {
        model_type
        for mapping in MAPPINGS
        for model_type, names in _names(mapping).items()
        if not exported.isdisjoint([names] if isinstance(names, str) else names)
    }
    return sorted(in_mappings & set(CONFIG_MAPPING_NAMES))


def classes_of(model_type: str) -> list[type[Any]]:
    """The classes of a type that are proven: its main class, and its decoder if that is another class."""
    import transformers

    names: list[str] = []
    for mapping in MAPPINGS:
        name = _names(mapping).get(model_type)
        if name is None or (names and mapping != "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"):
            continue
        name = name if isinstance(name, str) else name[0]
        if name not in names:
            names.append(name)
    return [getattr(transformers, name) for name in names if hasattr(transformers, name)]
