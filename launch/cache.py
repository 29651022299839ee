"""``kvferry namespace`` and ``kvferry cache clear``: naming a tenant's pages, and forgetting them.

Owns how both find the cluster. A namespace is computed from the facts that the nodes state, as the
gateway does for its requests; clearing is the gateway's, asked over HTTP. Imports no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gateway.cluster import ModelFacts, model_facts
from launch.config import DEFAULT_JOIN, JoinOptions
from launch.errors import ConfigError, NothingHeld, StartError
from launch.http_client import post_json
from launch.runtime import run_command
from launch.status import fetch, only_the_error_line
from transfer.identity import Role
from transfer.membership import MembershipView

CLEAR_TIMEOUT_S = 90.0  # the gateway gives the nodes 60


def find(join: str | None, secret_file: str | None, timeout_s: float) -> MembershipView:
    """Return the members of the cluster at ``join``.

    Raises:
        LaunchError: nobody answers there, or the secret cannot be read.
    """
    options = JoinOptions.of(join=join or DEFAULT_JOIN, secret_file=secret_file)
    with only_the_error_line():
        return run_command(fetch(options, timeout_s))


def namespace_hex(
    view: MembershipView, *, model: str | None, salt: str | None, adapter: str | None
) -> str:
    """Return the namespace of requests with this salt and adapter, as 64 hex digits.

    Raises:
        StartError: no node has stated the model's facts.
        ConfigError: the cluster serves another model; an empty salt or adapter.
    """
    for option, value in (("--salt", salt), ("--adapter", adapter)):
        if value == "":
            raise ConfigError(f"{option} '': empty: leave it out, or give what requests send")
    facts = model_facts(view)
    if facts is None:
        raise StartError(
            "no prefill or decode node has joined: start one, it states the model's fingerprint"
        )
    _check_model(model, facts)
    return facts.namespace(salt, adapter).hex()


def _check_model(model: str | None, facts: ModelFacts) -> None:
    if model is not None and facts.model not in (model, Path(model).name):
        raise ConfigError(f"--model {model}: this cluster serves {facts.model}: ask another --join")


def clear(view: MembershipView, order: dict[str, Any], admin_token: str | None) -> dict[str, Any]:
    """Have the gateway clear what ``order`` says (``POST /admin/cache/clear``); return its answer.

    Raises:
        StartError: no gateway, or not everything could be cleared: the message says what.
        ConfigError: the gateway refuses the order.
    """
    gateways = view.with_role(Role.GATEWAY)
    urls = [m.info.labels["url"] for m in gateways if "url" in m.info.labels]
    if not urls:
        raise StartError("no gateway is in the cluster: start one with `kvferry gateway`")
    headers = {"authorization": f"Bearer {admin_token}"} if admin_token else {}
    url = f"{urls[0]}/admin/cache/clear"
    response = post_json(url, order, headers=headers, timeout_s=CLEAR_TIMEOUT_S)
    if response is None:
        raise StartError(f"{url}: nobody answers: is the gateway reachable from here?")
    body = response.body if isinstance(response.body, dict) else {}
    if response.status == 200:
        return body
    said = body.get("error", {}).get("message", f"status {response.status}")
    if "nodes" not in body:
        raise ConfigError(f"{url}: {said}")
    missed = [f"{n['node_id']} ({n['error']})" for n in body["nodes"] if n["error"]]
    raise StartError(f"{said}: {'; '.join(missed)}")


def nothing_held(body: dict[str, Any]) -> NothingHeld | None:
    """Return why a clear that found no pages is worth a look; None when it is not.

    Nothing at all under a name is mostly a name that is misspelled. A cluster that holds nothing is
    as ``--all`` wants it.
    """
    if body["namespace"] is None or any(node["num_pages"] for node in body["nodes"]):
        return None
    named, how = body.get("named_by"), "as given"
    checks = "Is it the name that `kvferry namespace` prints?"
    if named is not None:
        parts = [f"{name} {named[name]!r}" for name in ("model", "salt", "adapter") if named[name]]
        missing = [f"no {name}" for name in ("salt", "adapter") if not named[name]]
        how = "computed from " + ", ".join(parts + missing)
        checks = (
            "Are salt and adapter spelled as the requests have them (cache_salt), case and all?"
        )
    return NothingHeld(
        f"no pages under namespace {body['namespace']} ({how}): nothing was cleared. {checks} "
        "Is --join the cluster that served them? `kvferry status` lists the namespaces that hold "
        "pages; they may also have been evicted or cleared before"
    )


def report(body: dict[str, Any]) -> list[str]:
    """Return what each node forgot, for people."""
    lines = [f"namespace {body['namespace'] or '(all)'}"]
    for node in body["nodes"]:
        lines.append(f"{node['node_id']}  {node['role']}  {node['num_pages']} pages")
    return lines
