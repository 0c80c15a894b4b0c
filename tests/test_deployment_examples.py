"""examples/deployment: the server takes its flags, and the probes ask for endpoints that need no key."""

import json
from pathlib import Path

import yaml

from sglang.cli.main import serve_argv
from sglang.srt.entrypoints.auth import Access
from sglang.srt.entrypoints.http_app import ROUTES
from sglang.srt.server_args import ServerArgs, prepare_server_args

FOLDER = Path(__file__).parents[1] / "examples" / "deployment"


def serve(arguments: list[str]) -> ServerArgs:
    """What the image's entry point makes of a container's arguments."""
    (entry,) = [line for line in (FOLDER / "Dockerfile").read_text().splitlines() if line.startswith("ENTRYPOINT")]
    command = [*json.loads(entry.removeprefix("ENTRYPOINT")), *arguments]
    assert command[:2] == ["sglang", "serve"]
    return prepare_server_args(serve_argv(command[2:]))


def test_compose() -> None:
    services = yaml.safe_load((FOLDER / "docker-compose.yml").read_text())["services"]
    assert set(services) == {"server-0", "server-1", "router"}
    for name in ("server-0", "server-1"):
        args = serve(services[name]["command"])
        assert (args.host, args.port, args.model_path) == ("0.0.0.0", 30000, "/model")
        assert f"http://{name}:30000" in services["router"]["command"]


def test_kubernetes() -> None:
    parts = {
        (p["kind"], p["metadata"]["name"]): p for p in yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())
    }
    servers = parts["StatefulSet", "sglang-server"]["spec"]
    (container,) = servers["template"]["spec"]["containers"]
    args = serve(container["args"])
    assert (args.host, args.port, args.enable_metrics) == ("0.0.0.0", container["ports"][0]["containerPort"], True)
    free = {path for paths, _, _, access in ROUTES for path in paths.split() if access is Access.FREE}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] in free
    (router,) = parts["Deployment", "sglang-router"]["spec"]["template"]["spec"]["containers"]
    for i in range(servers["replicas"]):
        assert f"http://sglang-server-{i}.{servers['serviceName']}:{args.port}" in router["args"]
