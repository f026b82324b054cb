"""The page kubernetes.md: its manifests are consistent, and its program runs with the environment that they set."""

import contextlib
import os
import re
import subprocess

import pytest
import redis
import yaml
from pages import DOCS, blocks_of
from redis.backoff import ConstantBackoff
from redis.retry import Retry
from support.until import until
from support.warm_python import WarmPython

from redisacc.embedded import Server, find_server
from redisacc.embedded.addresses import free_port
from redisacc.embedded.cluster_node import BUS_OFFSET

PAGE = DOCS / "guides" / "kubernetes.md"
FILES = {block.file: block.text for block in blocks_of(PAGE) if block.file} if PAGE.is_file() else {}
SETTINGS = ("appendonly", "maxmemory-policy", "masterauth")
pytestmark = pytest.mark.skipif(not FILES, reason="the documentation isn't part of an installation")


def manifests(name):
    """The manifests of a file, by kind and name."""
    return {f"{one['kind']} {one['metadata']['name']}": one for one in yaml.safe_load_all(FILES[name])}


def containers():
    for one in [*manifests("valkey.yaml").values(), *manifests("training.yaml").values()]:
        yield from one["spec"]["template"]["spec"]["containers"] if "template" in one.get("spec", {}) else ()


def environment(job, index, url):
    """The environment of a container of a job, as Kubernetes makes it, with another server."""
    found = {}
    for one in job["spec"]["template"]["spec"]["containers"][0]["env"]:
        if "value" in one:
            value = one["value"]
        elif "fieldRef" in one["valueFrom"]:
            assert "job-completion-index" in one["valueFrom"]["fieldRef"]["fieldPath"]
            assert job["spec"]["completionMode"] == "Indexed"
            value = str(index)
        else:
            value = "secret"
        # Kubernetes puts variables in that were defined above.
        found[one["name"]] = re.sub(r"\$\((\w+)\)", lambda match: found[match[1]], value)
    assert found["REDISACC_URL"] == "redis://:secret@valkey:6379/0"
    return {**found, "REDISACC_URL": url}


def test_names_fit_together():
    server = manifests("valkey.yaml")
    secret, service, stateful = server["Secret valkey"], server["Service valkey"], server["StatefulSet valkey"]
    labels = stateful["spec"]["template"]["metadata"]["labels"]
    assert labels == stateful["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    assert stateful["spec"]["serviceName"] == service["metadata"]["name"]
    claims = {claim["metadata"]["name"] for claim in stateful["spec"]["volumeClaimTemplates"]}
    for container in containers():
        for one in container["env"]:
            assert set(one) in ({"name", "value"}, {"name", "valueFrom"})
            assert isinstance(one.get("value", ""), str), one
            if "secretKeyRef" in one.get("valueFrom", {}):
                given = one["valueFrom"]["secretKeyRef"]
                assert given["name"] == secret["metadata"]["name"]
                assert given["key"] in secret["stringData"]
        assert {mount["name"] for mount in container.get("volumeMounts", [])} <= claims


@contextlib.contextmanager
def started(container, folder, **environment):
    """Starts the server of a container, and yields its process, a client and its settings."""
    (folder / "valkey-server").symlink_to(find_server())
    script = container["args"][0].replace("/data", str(folder)).replace("/tmp/valkey.conf", str(folder / "v.conf"))
    port = next(port for port in iter(free_port, 0) if port + BUS_OFFSET <= 65_535)
    environment |= {"PATH": f"{folder}:{os.environ['PATH']}", "VALKEY_PASSWORD": "secret"}
    command = [*container["command"], f"{script} --port {port}"]
    with subprocess.Popen(command, env={**os.environ, **environment}, stdout=subprocess.DEVNULL) as process:
        try:
            with redis.Redis(port=port, password="secret", retry=Retry(ConstantBackoff(0.05), 400)) as client:
                yield process, client, {name: client.config_get(name)[name] for name in SETTINGS}
        finally:
            process.kill()


def test_the_server_starts_as_the_manifest_says(tmp_path):
    (container, *_) = containers()
    with started(container, tmp_path) as (process, _, settings):
        assert (settings["appendonly"], settings["maxmemory-policy"]) == ("yes", "noeviction")
        # The signal of Kubernetes reaches the server itself, and not a shell above it.
        process.terminate()
        assert process.wait(60) == 0


def test_a_node_of_the_cluster_starts_as_the_manifest_says(tmp_path):
    found = manifests("valkey-cluster.yaml")
    service, stateful = found["Service valkey-cluster"], found["StatefulSet valkey-cluster"]
    template = stateful["spec"]["template"]
    assert template["metadata"]["labels"] == stateful["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    assert stateful["spec"]["serviceName"] == service["metadata"]["name"]
    (container,) = template["spec"]["containers"]
    assert {one["name"] for one in container["env"]} == {"VALKEY_PASSWORD", "POD_NAME", "POD_IP"}
    with started(container, tmp_path, POD_NAME="valkey-cluster-0", POD_IP="127.0.0.1") as (_, client, settings):
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16_383)
        until(lambda: b"cluster_state:ok" in client.execute_command("CLUSTER", "INFO"))
        # Clients are told the name.
        ((_, _, (host, *_)),) = client.execute_command("CLUSTER", "SLOTS")
        assert host == f"valkey-cluster-0.{service['metadata']['name']}".encode()
        assert settings["masterauth"] == "secret"


@pytest.mark.slow
def test_the_program_runs_with_the_environment_of_the_manifests(tmp_path):
    (tmp_path / "train.py").write_text(FILES["train.py"])
    job = manifests("training.yaml")["Job train"]
    number = job["spec"]["completions"]
    assert number == job["spec"]["parallelism"]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("REDISACC_")}
    with Server() as server, contextlib.ExitStack() as stack:
        places = [environment(job, index, server.url) for index in range(number)]
        processes = [
            stack.enter_context(WarmPython(["train.py"], cwd=tmp_path, env=inherited | place, text=True))
            for place in places
        ]
        try:
            said = [process.communicate(timeout=100)[0] for process in processes]
            assert said == ["step 30, weights [1. 2.]\n"] * number
            assert [process.wait(60) for process in processes] == [0] * number
        finally:
            for process in processes:
                process.kill()
