"""The settings of a run: RunSpec and its parts, recipes, changes of settings by name, and the job of a rank.

Not here: checks that need the machine or its hosts (``infra.head.preflight``).
"""

from t5train.spec.cluster_spec import Accelerator, ClusterSpec, DeadlinesSpec, MachinesSpec
from t5train.spec.data_spec import NUM_SENTINELS, CorpusSpec, ShardsSpec, TokenizerSpec
from t5train.spec.evaluate_spec import EvaluateSpec
from t5train.spec.model_spec import ExpertsSpec, ModelSpec, pad_vocabulary
from t5train.spec.monitor_spec import MonitorSpec, ProfileSpec
from t5train.spec.pairs_spec import PairsSpec, RowLengths
from t5train.spec.run_spec import RUN_NAME_PATTERN, RunSpec, build, setting_names
from t5train.spec.settings import SpecPart, nearest
from t5train.spec.storage_spec import StorageSpec
from t5train.spec.training_spec import FinetuneSpec, LayoutSpec, LoraSpec, MixingSpec, ObjectiveSpec, OptimizerSpec

__all__ = [
    "NUM_SENTINELS", "RUN_NAME_PATTERN", "Accelerator", "ClusterSpec", "CorpusSpec", "DeadlinesSpec", "EvaluateSpec",
    "ExpertsSpec", "FinetuneSpec", "LayoutSpec", "LoraSpec", "MachinesSpec", "MixingSpec", "ModelSpec", "MonitorSpec",
    "ObjectiveSpec", "OptimizerSpec", "PairsSpec", "ProfileSpec", "RowLengths", "RunSpec", "ShardsSpec", "SpecPart",
    "StorageSpec", "TokenizerSpec", "build", "nearest", "pad_vocabulary", "setting_names",
]  # fmt: skip
