"""Notifications: Prefect's server posts to a webhook when a run fails, crashes or is late.

The URL is a secret, because whoever has it can post. Prefect keeps it in a block, whose URL it encrypts and does not
show. The message is JSON with the key ``text``, which Slack, Mattermost and Google Chat take.
"""

import os
from contextlib import suppress
from datetime import timedelta
from urllib.parse import urlsplit
from uuid import UUID

from prefect.blocks.webhook import Webhook
from prefect.client.orchestration import PrefectClient, get_client
from prefect.events.actions import CallWebhook
from prefect.events.schemas.automations import Automation, AutomationCore, EventTrigger, Posture
from prefect.exceptions import ObjectNotFound
from prefect.types import SecretDict
from pydantic import SecretStr

from t5train.errors import InputError

WEBHOOK_VARIABLE = "T5_PRETRAIN_WEBHOOK"
BLOCK = "t5-pretrain-webhook"
PREFIX = "t5-pretrain:"
"""What the names of our automations begin with. All automations with such names are ours."""

STATES = {
    f"{PREFIX} run failed": "Failed",
    f"{PREFIX} run crashed": "Crashed",
    f"{PREFIX} run crashed and is not resumed": "NotResumed",
    f"{PREFIX} run is lost": "Lost",
    f"{PREFIX} run is late": "Late",
}
"""For each automation, the name of the state of a run that triggers it."""

_FLOWS = ["t5-pretrain", "t5-finetune", "t5-regression"]
_RUN = "event.resource['prefect.resource.name']"  # the event, not the run, whose state may have changed since
_STATE, _MESSAGE = "event.resource['prefect.state-name']", "event.resource['prefect.state-message']"
_PAYLOAD = f"{{% set text %}}run {{{{ {_RUN} }}}}: {{{{ {_STATE} }}}}. {{{{ {_MESSAGE} }}}}{{% endset %}}"
_PAYLOAD += '{"text": {{ text | trim | tojson }}}'


def webhook_url() -> str | None:
    """Return the URL in T5_PRETRAIN_WEBHOOK; None if it is unset or empty. Raises InputError if it is no URL."""
    url = os.environ.get(WEBHOOK_VARIABLE)
    if url and not _is_web_address(url):
        raise InputError(f"{WEBHOOK_VARIABLE} is not a URL that begins with https:// or http://")
    return url or None


def _is_web_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)


async def notify(url: str | None) -> None:
    """Make the server post to ``url``, or remove the block and the automations if it is None. Can be repeated."""
    async with get_client() as client:
        await (_remove(client) if url is None else _apply(client, url))


async def _apply(client: PrefectClient, url: str) -> None:
    webhook = Webhook(url=SecretStr(url), headers=SecretDict({"Content-Type": "application/json"}))
    block = await webhook.asave(BLOCK, overwrite=True, client=client)
    existing = {automation.name: automation.id for automation in await _ours(client)}
    for name, state in STATES.items():
        if name in existing:
            await client.update_automation(existing[name], _automation(name, state, block))
        else:
            await client.create_automation(_automation(name, state, block))
    for name in existing.keys() - STATES.keys():
        await client.delete_automation(existing[name])


def _automation(name: str, state: str, block: UUID) -> AutomationCore:
    return AutomationCore(
        name=name,
        description="Created by t5-pretrain notifications, which would undo changes made here",
        trigger=EventTrigger(
            expect={f"prefect.flow-run.{state}"},
            match={"prefect.resource.id": "prefect.flow-run.*"},
            match_related={"prefect.resource.role": "flow", "prefect.resource.name": _FLOWS},
            posture=Posture.Reactive,
            threshold=1,
            within=timedelta(0),
        ),
        actions=[CallWebhook(block_document_id=block, payload=_PAYLOAD)],
    )


async def _remove(client: PrefectClient) -> None:
    for automation in await _ours(client):
        await client.delete_automation(automation.id)
    with suppress(ObjectNotFound):
        await Webhook.adelete(BLOCK, client=client)


async def _ours(client: PrefectClient) -> list[Automation]:
    return [each for each in await client.read_automations() if each.name.startswith(PREFIX)]
