"""``everstep operator``: the Kubernetes operator, and what has to be applied for it."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import sys
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from everstep.kube.operator import OperatorSettings
    from everstep.kube.webhook import Webhook

_MISSING = "the operator needs more packages: pip install 'everstep[kube]'"


@click.group()
def operator() -> None:
    """Ray clusters on Kubernetes whose slices live and die as one."""


@operator.command()
@click.option("--namespace", "-n", "namespaces", multiple=True, metavar="N", help="Only this; repeatable.")
@click.option("--all-clusters", is_flag=True, help='Also those without everstep.dev/managed: "true".')
@click.option("--kubeconfig", metavar="FILE", help="As for kubectl.")
@click.option("--context", metavar="NAME", help="As for kubectl.")
@click.option(
    "--lease-namespace",
    default="default",
    show_default=True,
    metavar="N",
    help="Without --namespace: where operators of all namespaces agree on one of them.",
)
@click.option(
    "--lease-seconds",
    default=15.0,
    show_default=True,
    type=click.FloatRange(min=1),
    help="How long an operator that falls silent stays the one of its namespaces.",
)
@click.option(
    "--renew-deadline-seconds",
    type=float,
    help="How long it may fail to renew its lease before it stops writing.  [default: 2/3 of the lease]",
)
@click.option(
    "--retry-seconds",
    type=float,
    help="Between two tries to get or renew the lease.  [default: 2/15 of the lease]",
)
@click.option("--webhook-service", metavar="N/NAME", help="Validate RayClusters, behind this Service.")
@click.option("--webhook-url", metavar="URL", help="Validate RayClusters, at this URL.")
@click.option("--webhook-port", default=9443, show_default=True, help="Where the webhook listens.")
@click.option("--metrics-port", type=int, metavar="PORT", help="Serve /metrics, /healthz and /readyz there.")
@click.option("--verbose", "-v", is_flag=True)
def run(
    namespaces: tuple[str, ...],
    all_clusters: bool,
    kubeconfig: str | None,
    context: str | None,
    lease_namespace: str,
    lease_seconds: float,
    renew_deadline_seconds: float | None,
    retry_seconds: float | None,
    webhook_service: str | None,
    webhook_url: str | None,
    webhook_port: int,
    metrics_port: int | None,
    verbose: bool,
) -> None:
    """Look after RayClusters, until stopped. The cluster is found as kubectl finds it."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("everstep").setLevel(logging.DEBUG if verbose else logging.INFO)
    try:
        from everstep.kube.lease import Election
        from everstep.kube.operator import OperatorSettings
        from everstep.kube.webhook import Webhook
    except ModuleNotFoundError as error:
        raise click.ClickException(f"{_MISSING} ({error.name} is missing)") from error
    try:
        election = Election.of(lease_seconds, renew_deadline_seconds, retry_seconds)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    settings = OperatorSettings(
        namespaces=namespaces,
        all_clusters=all_clusters,
        lease_namespace=lease_namespace,
        election=election,
    )
    webhook = None
    if webhook_service or webhook_url:
        service: tuple[str, str] | None = None
        if webhook_service:
            home, _, name = webhook_service.partition("/")
            if not name:
                raise click.UsageError("--webhook-service is NAMESPACE/NAME")
            service = (home, name)
        address = "0.0.0.0" if service else "127.0.0.1"
        webhook = Webhook(port=webhook_port, address=address, service=service, url=webhook_url)
    import asyncio

    code = asyncio.run(_run(settings, webhook, metrics_port, kubeconfig, context))
    if code:
        sys.exit(code)


async def _run(
    settings: OperatorSettings,
    webhook: Webhook | None,
    metrics_port: int | None,
    kubeconfig: str | None,
    context: str | None,
) -> int:
    import asyncio

    from everstep.kube import metrics, other_operators, webhook as validating
    from everstep.kube.api import UNREACHABLE, Api, ApiError, NoCluster, said
    from everstep.kube.lease import LeaseGone
    from everstep.kube.operator import Operator

    log = logging.getLogger("everstep.kube")
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)

    async def look_after() -> None:
        async with await Api.connect(kubeconfig, context) as api, contextlib.AsyncExitStack() as around:
            await other_operators.check(api, settings)
            running = Operator(api, settings)
            if metrics_port is not None:
                await around.enter_async_context(metrics.served(running, metrics_port))

            # Also while it stands by: a Service leads to whoever is ready.
            if webhook is not None:
                await around.enter_async_context(validating.served(webhook, api, settings))

            async def ready() -> None:
                where = ", ".join(settings.namespaces) or "all namespaces"
                log.info("looking after RayClusters in %s", where)

            await running.run(ready)

    code = 0
    try:
        await look_after()
    except* asyncio.CancelledError:
        log.info("stopped")
    except* (other_operators.OperatorRefused, NoCluster) as errors:
        click.echo(f"everstep operator: {errors.exceptions[0]}", err=True)
        code = 2
    except* LeaseGone as errors:
        log.error("%s", errors.exceptions[0])
        code = 1
    except* ApiError as errors:
        log.error("the API server: %s", errors.exceptions[0])
        code = 1
    except* UNREACHABLE as errors:
        log.error("the API server doesn't answer: %s. See `kubectl cluster-info`", said(errors.exceptions[0]))
        code = 1
    return code


@operator.command()
@click.option("--crd-only", is_flag=True, help="Only the definition of RayClusters.")
@click.option("--image", metavar="IMAGE", help="The operator's container image.")
@click.option("--home", default="everstep-system", show_default=True, metavar="N", help="Where it lives.")
@click.option("--namespace", "-n", "namespaces", multiple=True, metavar="N", help="Only this; repeatable.")
@click.option("--all-clusters", is_flag=True, help="Also clusters without the annotation.")
@click.option("--replace-crd", is_flag=True, help="Write the definition even over one that isn't Everstep's.")
@click.option("--offline", is_flag=True, help="Don't ask the cluster which definition it has.")
@click.option("--kubeconfig", metavar="FILE", help="As for kubectl.")
@click.option("--context", metavar="NAME", help="As for kubectl.")
def manifests(
    crd_only: bool,
    image: str | None,
    home: str,
    namespaces: tuple[str, ...],
    all_clusters: bool,
    replace_crd: bool,
    offline: bool,
    kubeconfig: str | None,
    context: str | None,
) -> None:
    """What to apply: everstep operator manifests --image … | kubectl apply -f -"""
    import asyncio

    from everstep.kube.crd import custom_resource_definition

    if not crd_only and image is None:
        raise click.UsageError(
            "--image is needed: build one from deploy/operator.Dockerfile, and push it where the cluster can "
            "pull it"
        )
    try:
        from everstep.kube.manifests import manifests as made
    except ModuleNotFoundError as error:
        raise click.ClickException(f"{_MISSING} ({error.name} is missing)") from error
    owner = None if replace_crd or offline else asyncio.run(_foreign_definition(kubeconfig, context))
    if owner is not None and crd_only:
        raise click.ClickException(
            f"the cluster's definition of RayClusters is {owner}'s; Everstep works with KubeRay's. "
            "To write over it nevertheless: --replace-crd"
        )
    items: list[dict[str, Any]] = [] if owner else [custom_resource_definition()]
    if owner:
        click.echo(f"the cluster's definition of RayClusters is {owner}'s, and is left as it is", err=True)
    if not crd_only:
        assert image is not None
        items += made(image, home, namespaces, all_clusters)
    click.echo(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}, indent=2))


async def _foreign_definition(kubeconfig: str | None, context: str | None) -> str | None:
    from everstep.kube import other_operators
    from everstep.kube.api import UNREACHABLE, Api, ApiError, NoCluster, said

    try:
        async with await Api.connect(kubeconfig, context) as api:
            return await other_operators.foreign_definition(api)
    except (ApiError, NoCluster, *UNREACHABLE) as error:
        raise click.ClickException(
            f"whether the cluster has a definition of RayClusters, which must not be written over, can't be "
            f"seen: {said(error)}. To get the manifests without asking: --offline"
        ) from error
