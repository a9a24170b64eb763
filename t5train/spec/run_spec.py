"""RunSpec: everything that decides a run, as data."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from t5train.errors import SpecError
from t5train.files.run_folder import RUNS
from t5train.records.identity import fingerprint
from t5train.records.locations import is_remote_model
from t5train.spec.cluster_spec import ClusterSpec
from t5train.spec.data_spec import CorpusSpec, ShardsSpec, TokenizerSpec
from t5train.spec.evaluate_spec import PREDICTION, EvaluateSpec
from t5train.spec.model_spec import ModelSpec
from t5train.spec.monitor_spec import MonitorSpec, ProfileSpec
from t5train.spec.pairs_spec import PairsSpec
from t5train.spec.settings import SpecPart, change, check, explain, settings_of
from t5train.spec.storage_spec import VALIDATIONS, StorageSpec
from t5train.spec.training_spec import LOSS_TERMS, FinetuneSpec, LayoutSpec, ObjectiveSpec, OptimizerSpec

RUN_NAME_PATTERN = "^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$"


class RunSpec(SpecPart):
    """The spec of one run. Change settings with ``with_settings``, never with ``model_copy``."""

    execution = frozenset({"recipe", "name", "layout", "storage", "cluster", "monitor", "profile"})

    recipe: str = Field(
        pattern="^[a-z0-9][a-z0-9_-]{0,39}$",
        description="Recipe that the settings start from; settings that are left out have its values",
    )
    name: str | None = Field(
        None,
        pattern=RUN_NAME_PATTERN,
        description="Name of the run, whose folder is {root}/runs/{name}. null: made of recipe and fingerprint",
    )
    corpus: CorpusSpec = CorpusSpec()
    pairs: PairsSpec = PairsSpec()
    tokenizer: TokenizerSpec = TokenizerSpec()
    shards: ShardsSpec = ShardsSpec()
    objective: ObjectiveSpec = ObjectiveSpec()
    model: ModelSpec = ModelSpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    finetune: FinetuneSpec = FinetuneSpec()
    evaluate: EvaluateSpec = EvaluateSpec()
    layout: LayoutSpec = LayoutSpec()
    storage: StorageSpec = StorageSpec()
    cluster: ClusterSpec = ClusterSpec()
    monitor: MonitorSpec = MonitorSpec()
    profile: ProfileSpec = ProfileSpec()

    @check
    def _batch_divides(self) -> None:
        stages, ranks = self.layout.pipeline_stages, self.cluster.ranks
        if ranks % stages:
            raise ValueError(f"layout.pipeline_stages is {stages}: it must divide cluster.ranks ({ranks})")
        batch, micro = self.optimizer.global_batch_sequences, self.layout.micro_batch_sequences
        models = self.data_parallel_size
        per_pass = micro * models
        if batch % per_pass:
            a_model = " / layout.pipeline_stages" if stages > 1 else ""
            smaller = next((each for each in range(micro, 0, -1) if batch % (each * models) == 0), None)
            remedy = (
                f"layout.micro_batch_sequences={smaller}"
                if smaller
                else f"optimizer.global_batch_sequences={-(-batch // per_pass) * per_pass}"
            )
            raise ValueError(
                f"optimizer.global_batch_sequences is {batch}: it must be a multiple of layout.micro_batch_sequences x "
                f"cluster.ranks{a_model} ({micro} x {models} = {per_pass}). Set for instance {remedy}"
            )

    @check
    def _rates_are_of_a_mixture(self) -> None:
        more = len(self.corpus.mixed_with)
        named = f"corpus.source and {more} in corpus.mixed_with"
        self.objective.require_mixture(1 + more, "text", "with corpus.mixed_with", named)

    @check
    def _terms_of_the_loss_are_of_pairs(self) -> None:
        chosen = [name for name in LOSS_TERMS if getattr(self.optimizer, name)]
        if chosen and not self.is_fine_tuning:
            raise ValueError(
                f"optimizer.{chosen[0]} is {getattr(self.optimizer, chosen[0])}, but only fine-tuning has it: set "
                f"optimizer.{chosen[0]}=0, or name pairs to train on (pairs.train)"
            )

    @check
    def _best_checkpoint_can_be_chosen(self) -> None:
        metric = self.evaluate.best_metric
        if metric not in (None, "validation_loss") and not self.is_fine_tuning:
            raise ValueError(
                f"evaluate.best_metric is {metric}, but only fine-tuning measures it: set "
                "evaluate.best_metric=validation_loss, or name pairs to train on (pairs.train)"
            )

    @check
    def _predictions_are_of_pairs(self) -> None:
        chosen = [
            name for name in (*PREDICTION, "hostfile") if getattr(self.evaluate, name) != getattr(EvaluateSpec(), name)
        ]
        if chosen and not self.is_fine_tuning:
            raise ValueError(
                f"evaluate.{chosen[0]} is {getattr(self.evaluate, chosen[0])}, but only fine-tuning predicts held-out "
                f"pairs: leave evaluate.{chosen[0]} out, or name pairs to train on (pairs.train)"
            )

    @check
    def _adapters_have_a_model_and_pairs(self) -> None:
        lora, start = self.finetune.lora, self.model.start_from
        if lora.rank is None:
            return
        given = f"finetune.lora.rank is {lora.rank}, but"
        if not self.is_fine_tuning:
            raise ValueError(
                f"{given} LoRA is for fine-tuning: name pairs to train on (pairs.train), or leave finetune.lora out"
            )
        if start is None:
            raise ValueError(
                f"{given} model.start_from is not set: set it to the model that the adapters are for, or leave "
                "finetune.lora out"
            )
        if self.optimizer.kind != "adamw":
            raise ValueError(
                f"{given} optimizer.kind is {self.optimizer.kind}, whose steps are relative to the RMS of a tensor, "
                "and one factor of each adapter starts at zero: set optimizer.kind=adamw, and "
                "optimizer.peak_learning_rate=0.0003"
            )
        others = {"wi"} if self.model.is_gated else {"wi_0", "wi_1"}
        if missing := sorted(others.intersection(lora.targets)):
            there = "wi_0 and wi_1" if self.model.is_gated else "wi"
            raise ValueError(
                f"finetune.lora.targets has {missing[0]!r}, but this model has {there} in its place: name those"
            )

    @check
    def _weights_fit_their_precision(self) -> None:
        model = self.model
        if self.is_fine_tuning and model.start_from and model.version == "v1.0" and self.optimizer.precision == "fp16":
            raise ValueError(
                f"optimizer.precision is fp16, but model.start_from is {str(model.start_from)!r}, a T5 v1.0, whose "
                "activations overflow in fp16: set optimizer.precision=bf16"
            )

    @check
    def _code_is_sent_to_hosts(self) -> None:
        self.cluster.require_hosts_for_code(self.evaluate.hostfile)

    @check
    def _dask_has_hosts(self) -> None:
        if self.shards.executor == "dask" and self.cluster.hostfile is None:
            raise ValueError(
                "shards.executor is dask, but cluster.hostfile is not set: give --hostfile, or set "
                "shards.executor=local"
            )
        if self.shards.executor == "dask" and self.storage.node_local:
            raise ValueError(
                "shards.executor is dask, but storage.node_local says that hosts share no storage, which it needs: set "
                "shards.executor=local"
            )

    @check
    def _pipelines_have_their_own_ways(self) -> None:
        stages = self.layout.pipeline_stages
        refused = {
            f"layout.zero_stage {self.layout.zero_stage} (set layout.zero_stage=1)": self.layout.zero_stage != 1,
            f"layout.offload {self.layout.offload!r} (set layout.offload=none)": self.layout.offload != "none",
            "experts (set model.moe.num_experts=0)": self.model.moe.num_experts > 0,
        }
        if stages > 1 and any(refused.values()):
            what = "; ".join(what for what, refuse in refused.items() if refuse)
            raise ValueError(f"layout.pipeline_stages is {stages}, which cannot be combined with {what}")

    @check
    def _layout_has_masters(self) -> None:
        if self.optimizer.precision == "fp16" and self.layout.zero_stage == 0:
            raise ValueError("layout.zero_stage is 0, but optimizer.precision=fp16 needs ZeRO 1, 2 or 3")

    @check
    def _experts_spread_evenly(self) -> None:
        size, experts = self.layout.expert_parallel_size, self.model.moe.num_experts
        if size > 1 and not experts:
            raise ValueError(f"layout.expert_parallel_size is {size}: a dense model has no experts to spread; set 1")
        for what, count in (("model.moe.num_experts", experts), ("cluster.ranks", self.cluster.ranks)):
            if count % size:
                raise ValueError(f"layout.expert_parallel_size is {size}: it must divide {what} ({count})")

    @check
    def _experts_have_a_zero_stage(self) -> None:
        if self.model.moe.num_experts and self.layout.zero_stage not in (1, 2):
            raise ValueError(
                f"layout.zero_stage is {self.layout.zero_stage} and model.moe.num_experts "
                f"{self.model.moe.num_experts}: experts need ZeRO 1 or 2. At ZeRO 0, DeepSpeed clips "
                "gradients by a different norm on every rank; at ZeRO 3, DeepSpeed has no layers with experts"
            )

    @check
    def _model_and_checkpoints_have_their_own_folders(self) -> None:
        publish_to, stored = self.storage.publish_to, self.storage.publish_checkpoints_under
        if publish_to is None or stored is None or self.checkpoints_url is None:
            return
        if publish_to.replace("s3a://", "s3://", 1).rstrip("/") == self.checkpoints_url:
            raise ValueError(
                f"storage.publish_to is {publish_to!r}, and storage.publish_checkpoints_under is {stored!r}, so that "
                "model and checkpoints would be in one folder: change one of them"
            )

    @check
    def _pairs_have_one_layout(self) -> None:
        stages, experts, executor = self.layout.pipeline_stages, self.model.moe.num_experts, self.shards.executor
        for setting, value, usual in (
            ("layout.pipeline_stages", stages, 1),
            ("model.moe.num_experts", experts, 0),
            ("shards.executor", executor, "local"),
        ):
            if self.is_fine_tuning and value != usual:
                raise ValueError(
                    f"{setting} is {value}, but pairs (pairs.train) are trained on without pipelines, experts and "
                    f"Dask: set {setting}={usual}"
                )

    @check
    def _profiled_steps_exist(self) -> None:
        steps, num_steps = self.profile.range, self.optimizer.num_steps
        if steps is not None and steps.last > num_steps:
            raise ValueError(
                f"profile.steps is {self.profile.steps!r}, but the last step of the run is {num_steps} "
                f"(optimizer.num_steps). Set earlier steps, such as profile.steps={max(1, num_steps - 3)}:{num_steps}"
            )

    def identity(self) -> dict[str, Any]:
        """Return the identity settings of every part that has a say, ``{part: {setting: value}}``."""
        others = {"corpus", "shards", "objective"} if self.is_fine_tuning else {"pairs"}
        found = {name: part.identity() for name, part in self._parts() if name not in self.execution | others}
        if self.evaluate.best_metric is None:
            del found["evaluate"]
        else:  # which steps are validated, and on what, then decides which checkpoint is the best
            found["storage"] = {name: getattr(self.storage, name) for name in VALIDATIONS}
        if not found["finetune"]:
            del found["finetune"]
        if is_remote_model(self.model.start_from or ""):
            found["tokenizer"] = {
                "given": True
            }  # as when tokenizer.path names the copy, so that the run keeps its name
        return found

    def settings_without_locations(self) -> dict[str, Any]:
        """Return the identity settings, without where the text or the pairs are, which may be moved."""
        where = {"corpus": {"source", "mixed_with", "revision"}, "pairs": {"train", "validation", "test"}}
        return {
            part: {name: value for name, value in settings.items() if name not in where.get(part, ())}
            for part, settings in self.identity().items()
        }

    def training_settings(self) -> dict[str, Any]:
        """Return the identity settings of training, without those of the data that shards cover. None is a path."""
        parts = {"objective", "pairs", "model", "optimizer", "finetune", "evaluate", "storage"}
        return {part: settings for part, settings in self.settings_without_locations().items() if part in parts}

    def fingerprint(self) -> str:
        """Return the sha256 of the identity. It is equal for runs that give the same weights from the same inputs."""
        return fingerprint(self.identity())

    @property
    def is_fine_tuning(self) -> bool:
        """Whether the run trains on pairs, and not on text."""
        return bool(self.pairs.train)

    @property
    def predicts_held_out(self) -> bool:
        """Whether held-out pairs are predicted after the export."""
        return self.is_fine_tuning and self.evaluate.max_pairs > 0

    @property
    def has_dropout(self) -> bool:
        """Whether training drops activations, of the model or of its adapters."""
        return max(self.model.dropout_rate, self.finetune.lora.dropout) > 0

    @property
    def run_name(self) -> str:
        """The given name, or one made of recipe and fingerprint, so that different specs are different runs."""
        return self.name or f"{self.recipe}-{self.fingerprint()[:8]}"

    @property
    def checkpoints_url(self) -> str | None:
        """Where the run stores its checkpoints while it trains; None if it does not."""
        under = self.storage.publish_checkpoints_under
        return None if under is None else f"{under.rstrip('/')}/{self.run_name}"

    @property
    def run_folder(self) -> Path:
        """``{root}/runs/{run_name}``."""
        return self.storage.root / RUNS / self.run_name

    @property
    def data_parallel_size(self) -> int:
        """Number of model replicas: the number of ranks, divided by the stages of a pipeline."""
        return self.cluster.ranks // self.layout.pipeline_stages

    @property
    def gradient_accumulation(self) -> int:
        """Forward passes of each rank per optimizer step."""
        return self.optimizer.global_batch_sequences // (self.layout.micro_batch_sequences * self.data_parallel_size)

    def with_settings(self, settings: Mapping[str, Any]) -> "RunSpec":
        """Return this spec with ``{"part.key": value}`` changed; for values, see ``t5train.spec.settings.change``.

        Raises SpecError if a setting is unknown, or if the changed spec is not valid.
        """
        values = self.model_dump(mode="json")
        change(RunSpec, values, settings)
        return build(values)

    def _parts(self) -> Iterator[tuple[str, SpecPart]]:
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, SpecPart):
                yield name, value


def build(values: Mapping[str, Any]) -> RunSpec:
    """Build a RunSpec from plain values. Raises SpecError that lists all problems."""
    try:
        return RunSpec.model_validate(values)
    except ValidationError as error:
        raise SpecError(explain(error, RunSpec)) from None


def wrong_value(setting: str, value: Any) -> str:
    """Return what is wrong with the value of a setting, whatever the others are; empty if nothing is."""
    values = RunSpec(recipe="any").model_dump(mode="json")
    change(RunSpec, values, {setting: value})
    try:
        RunSpec.model_validate(values)
    except ValidationError as error:
        return explain(error, RunSpec, setting)
    return ""


def setting_names() -> list[str]:
    """Return the names of all settings that ``with_settings`` accepts."""
    return list(settings_of(RunSpec))
