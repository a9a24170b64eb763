"""The specification of a run: its parts, the whole, and changes by name."""

from t5train.spec.cluster import Accelerator, ClusterSpec, DeadlinesSpec
from t5train.spec.experts import ExpertsSpec
from t5train.spec.machines import MachinesSpec
from t5train.spec.part import SpecPart
from t5train.spec.parts import (
    NUM_SENTINELS,
    CorpusSpec,
    LayoutSpec,
    ModelSpec,
    ObjectiveSpec,
    OptimizerSpec,
    ShardsSpec,
    StorageSpec,
    TokenizerSpec,
    pad_vocabulary,
)
from t5train.spec.run import RUN_NAME_PATTERN, RunSpec, build, read, setting_names
from t5train.spec.settings import nearest

__all__ = [
    "NUM_SENTINELS",
    "RUN_NAME_PATTERN",
    "Accelerator",
    "ClusterSpec",
    "CorpusSpec",
    "DeadlinesSpec",
    "ExpertsSpec",
    "LayoutSpec",
    "MachinesSpec",
    "ModelSpec",
    "ObjectiveSpec",
    "OptimizerSpec",
    "RunSpec",
    "ShardsSpec",
    "SpecPart",
    "StorageSpec",
    "TokenizerSpec",
    "build",
    "nearest",
    "pad_vocabulary",
    "read",
    "setting_names",
]
