"""The front door to models on disk: find them, fetch them, list them. Needs no engine and never imports mlx."""

from engine.artifacts.catalogue import (
    CatalogueEntry,
    ModelLocation,
    list_models,
    models_folder,
    pull,
    require_known,
    resolve,
)
from engine.artifacts.pulling import Progress, PullProgress, Stage

__all__ = [
    "CatalogueEntry",
    "ModelLocation",
    "Progress",
    "PullProgress",
    "Stage",
    "list_models",
    "models_folder",
    "pull",
    "require_known",
    "resolve",
]
