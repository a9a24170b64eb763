"""Makes a Prefect server agree with ``deployments/prefect.yaml``. Safe to repeat.

What an earlier definition created, and no definition mentions any more, is removed. What people have created on the
server is not touched, and neither are their decisions: a schedule that somebody switched on, or a paused queue.
"""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate, WorkPoolCreate, WorkPoolUpdate
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule
from prefect.events import AutomationCore
from prefect.exceptions import ObjectNotFound
from prefect.flows import Flow
from prefect.variables import Variable
from prefect.workers.process import ProcessWorker
from pydantic import BaseModel

from flows.deployment.definitions import POOL, Definitions, Deployment
from flows.deployment.deployment_defaults import FINE_TUNING, DeploymentDefaults, changed

RECORD = "t5_pretrain_deploy"
"""The variable on the server that holds a Record."""
_NOT_FROM_OUTSIDE = ("command", "env", "working_dir")
"""Removed from both parts of the job template, because a run could set them to execute its own code."""
_DESCRIPTION_OF_QUEUES = "Its runs wait for each other, because each run uses all accelerators."


class Record(BaseModel):
    """What ``deploy`` keeps on the server for its next call."""

    defaults: dict[str, Any] = {}
    """What was given for all deployments."""
    created: list[str] = []
    """``Definitions.names`` of everything that it created and did not remove."""


class Deployed(NamedTuple):
    """What a call of ``deploy`` did."""

    names: list[str]
    """The full names of the deployments."""
    defaults: DeploymentDefaults
    refused: dict[str, str]
    """Why a run of a deployment would be refused with these defaults, by the deployment's name."""
    other_texts: dict[str, str | None]
    """What deployments train on that do not use the default text, if there is one; None: the flow takes no text."""


def deploy(given: Mapping[str, Any], default_root: Path) -> Deployed:
    """Apply the definitions, with the earlier defaults changed as given.

    ``default_root`` is used if no root is given, now or earlier. Raises an error, before anything is changed, if no
    deployment could begin with these defaults.
    """
    return asyncio.run(_deploy(given, default_root, Definitions.load()))


async def _deploy(given: Mapping[str, Any], default_root: Path, definitions: Definitions) -> Deployed:
    async with get_client() as client:
        record = Record.model_validate(await Variable.aget(RECORD, default={}))
        of_all = changed({"root": str(default_root)} | record.defaults, given)
        defaults = DeploymentDefaults.of(of_all)
        refused = defaults.refused(definitions)
        # Recorded first, so that an interrupted call's creations are known to the next one.
        created = list(dict.fromkeys([*record.created, *definitions.names()]))
        await _keep(Record(defaults=of_all, created=created))
        await _apply(client, definitions, defaults)
        for name in created:
            if name not in definitions.names():
                await _remove(client, name)
        await _keep(Record(defaults=of_all, created=definitions.names()))
        names = [each.full_name for each in definitions.deployments]
        return Deployed(names, defaults, refused, other_texts(definitions, defaults))


def other_texts(definitions: Definitions, defaults: DeploymentDefaults) -> dict[str, str | None]:
    """Return what deployments train on that do not use the default text; None for flows that take no text.

    Empty if there is no default text. Deployments that train on pairs are left out.
    """
    if defaults.corpus is None:
        return {}
    of_text = [each for each in definitions.deployments if each.flow.name != FINE_TUNING]
    texts = {each.full_name: defaults.of_deployment(each).get("corpus") for each in of_text}
    return {name: text for name, text in texts.items() if text != defaults.corpus}


async def _keep(record: Record) -> None:
    await Variable.aset(RECORD, record.model_dump(), overwrite=True)


async def _apply(client: PrefectClient, definitions: Definitions, defaults: DeploymentDefaults) -> None:
    await _apply_pool(client)
    for queue in definitions.queues:
        await _apply_queue(client, queue)
    for deployment in definitions.deployments:
        await _apply_deployment(client, deployment, definitions.pull, defaults)
    for automation in definitions.automations:
        await _apply_automation(client, automation)


async def _apply_pool(client: PrefectClient) -> None:
    template = job_template()
    try:
        await client.read_work_pool(POOL)
    except ObjectNotFound:
        await client.create_work_pool(WorkPoolCreate(name=POOL, type="process", base_job_template=template))
    else:
        await client.update_work_pool(POOL, WorkPoolUpdate(base_job_template=template))


async def _apply_queue(client: PrefectClient, name: str) -> None:
    """Create or update a queue for one run at a time. A deployment's own limit is lost when the server restarts."""
    try:
        queue = await client.read_work_queue_by_name(name, work_pool_name=POOL)
    except ObjectNotFound:
        queue = await client.create_work_queue(name, work_pool_name=POOL)
    await client.update_work_queue(queue.id, description=_DESCRIPTION_OF_QUEUES, concurrency_limit=1)


async def _apply_deployment(
    client: PrefectClient, wanted: Deployment, pull: list[dict[str, Any]], defaults: DeploymentDefaults
) -> None:
    """Create or update a deployment. One that agrees is left alone, because an update removes its scheduled runs."""
    values: dict[str, Any] = {
        "description": wanted.description,
        "parameters": defaults.of_deployment(wanted),
        "parameter_openapi_schema": parameter_schema(wanted.flow),
        "enforce_parameter_schema": wanted.enforce_parameter_schema,
        "work_pool_name": POOL,
        "work_queue_name": wanted.work_pool.work_queue_name,
        "entrypoint": wanted.entrypoint,
        "pull_steps": pull,
    }
    existing = await _read(client, wanted.full_name)
    schedules = _schedules(wanted, existing)
    if existing is None or not _agrees(existing, values, schedules):
        flow_id = await client.create_flow_from_name(wanted.flow.name)
        await client.create_deployment(flow_id, wanted.name, schedules=schedules, **values, **_decided(existing))


def _decided(existing: DeploymentResponse | None) -> dict[str, Any]:
    """Return what people may have decided about a deployment, and an update would otherwise reset."""
    if existing is None:
        return {"tags": ["t5"]}
    limit = existing.global_concurrency_limit
    return {
        "tags": existing.tags,
        "job_variables": existing.job_variables,
        "concurrency_limit": limit and limit.limit,
        "concurrency_options": existing.concurrency_options,
    }


async def _read(client: PrefectClient, full_name: str) -> DeploymentResponse | None:
    try:
        return await client.read_deployment_by_name(full_name)
    except ObjectNotFound:
        return None


def _agrees(
    existing: DeploymentResponse, values: Mapping[str, Any], schedules: Sequence[DeploymentScheduleCreate]
) -> bool:
    compared = ("slug", "schedule", "active", "parameters")
    there, wanted = (
        sorted((each.model_dump(include=set(compared)) for each in some), key=repr)
        for some in (existing.schedules, schedules)
    )
    return there == wanted and all(getattr(existing, name) == value for name, value in values.items())


def _schedules(wanted: Deployment, existing: DeploymentResponse | None) -> list[DeploymentScheduleCreate]:
    """Return the schedules: those that are defined, on or off as they are, and those that people have added."""
    there = existing.schedules if existing else []
    is_on = {schedule.slug: schedule.active for schedule in there}
    defined = [
        DeploymentScheduleCreate(
            schedule=CronSchedule(cron=each.cron, timezone=each.timezone),
            active=is_on.get(each.slug, False),
            parameters=each.parameters,
            slug=each.slug,
        )
        for each in wanted.schedules
    ]
    slugs = {each.slug for each in wanted.schedules}
    added = [
        DeploymentScheduleCreate(**each.model_dump(include=set(DeploymentScheduleCreate.model_fields)))
        for each in there
        if each.slug not in slugs
    ]
    return [*defined, *added]


def parameter_schema(flow: Flow[..., Any]) -> dict[str, Any]:
    """Return the JSON schema with which the server validates the parameters of every run that is created.

    The form in the UI sends null for an empty field. The server accepts it only where the schema has no default.
    """
    schema = flow.parameters.model_dump_for_openapi()
    for parameter in schema["properties"].values():
        if parameter.get("default", ...) is None:
            del parameter["default"]
    return schema | {"additionalProperties": False}


async def _apply_automation(client: PrefectClient, wanted: AutomationCore) -> None:
    """Create or update an automation. One that somebody switched off stays off.

    One that agrees is left alone, because an update makes it forget the events that it waits for.
    """
    existing = await client.read_automations_by_name(wanted.name)
    if not existing:
        await client.create_automation(wanted)
    for each in existing:
        changed = wanted.model_copy(update={"enabled": each.enabled})
        if each.model_dump(include=set(AutomationCore.model_fields)) != changed.model_dump():
            await client.update_automation(each.id, changed)


async def _remove(client: PrefectClient, name: str) -> None:
    """Remove what an earlier definition of this name created, if it still exists."""
    kind, _, of_kind = name.partition(" ")
    try:
        if kind == "deployment":
            await client.delete_deployment((await client.read_deployment_by_name(of_kind)).id)
        elif kind == "schedule":
            await _remove_schedule(client, *of_kind.split(" "))
        elif kind == "queue":
            queue = await client.read_work_queue_by_name(of_kind, work_pool_name=POOL)
            await client.delete_work_queue_by_id(queue.id)
        elif kind == "automation":
            for automation in await client.read_automations_by_name(of_kind):
                await client.delete_automation(automation.id)
    except ObjectNotFound:
        return  # somebody removed it


async def _remove_schedule(client: PrefectClient, deployment: str, slug: str) -> None:
    existing = await client.read_deployment_by_name(deployment)
    for schedule in existing.schedules:
        if schedule.slug == slug:
            await client.delete_deployment_schedule(existing.id, schedule.id)


def job_template() -> dict[str, object]:
    """Return Prefect's default without settings that change the program.

    Output is not streamed through the worker, because a run would die with the worker.
    """
    template = ProcessWorker.get_default_base_job_template()
    for name in _NOT_FROM_OUTSIDE:
        del template["variables"]["properties"][name]
        del template["job_configuration"][name]
    template["variables"]["properties"]["stream_output"]["default"] = False
    return template
