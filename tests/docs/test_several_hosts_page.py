"""The page several-hosts.md: its recipes run with stand-ins for ssh and SLURM, and its manifest as Kubernetes would."""

import os
import re
import secrets
import shlex
import subprocess
import sys

import pytest
import yaml
from pages import DOCS, Reader, blocks_of

PAGE = DOCS / "guides" / "several-hosts.md"
BLOCKS = blocks_of(PAGE) if PAGE.is_file() else []
FILES = {block.file: block.text for block in BLOCKS if block.file}
pytestmark = pytest.mark.skipif(not FILES, reason="the documentation isn't part of an installation")

# `redisacc` on a host, whose name and address are in two variables.
REDISACC = """#!/bin/sh
shift
exec {python} -m redisacc run --host-name "$HOST_NAME" --address "$HOST_ADDRESS" "$@"
"""
SSH = """#!/bin/bash
# Like a login: another environment, the home directory, and a shell that gets the command.
export HOST_NAME=$1 HOST_ADDRESS={block}.${{1#host}}
unset REDISACC_PASSWORD
cd {home}
exec sh -c "$2"
"""
SRUN = """#!/bin/bash
# One task on each node.
[ "$1" = --kill-on-bad-exit=0 ] && shift
for number in 1 2; do
  HOST_NAME=node$number HOST_ADDRESS={block}.$number SLURM_PROCID=$((number - 1)) "$@" &
done
wait %1 && wait %2
"""
SCONTROL = """#!/bin/sh
[ "$*" = "show hostnames node[1-2]" ] && printf '{block}.1\\nnode2\\n'
"""


class Machines:
    """Commands that stand for hosts, and what a recipe prints with them."""

    def __init__(self, folder):
        # Tests that run at the same time have other addresses.
        self.block = f"127.{1 + secrets.randbelow(254)}.{secrets.randbelow(256)}"
        self.home = folder
        self._bin = folder / "bin"
        self._bin.mkdir()
        (folder / "train").mkdir()
        for place in (folder, folder / "train"):
            (place / "train.py").write_text(FILES["train.py"])
        self.put("redisacc", REDISACC)
        self.put("python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')

    def put(self, name, text):
        """Puts a command on the PATH."""
        home = shlex.quote(str(self.home))
        filled = text.format(block=self.block, home=home, python=sys.executable) if "{" in text else text
        (self._bin / name).write_text(filled)
        (self._bin / name).chmod(0o755)

    def start(self, *command, given="", **environment):
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("REDISACC_", "SLURM_"))}
        process = subprocess.Popen(
            command,
            cwd=self.home,
            env={**inherited, "PATH": f"{self._bin}:{os.environ['PATH']}", **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        process.stdin.write(given)
        process.stdin.close()
        process.stdin = None
        return process


@pytest.fixture
def machines(tmp_path):
    return Machines(tmp_path)


def trained(said):
    """Checks that four workers on two hosts have trained, and that no host has said more than once that it came."""
    assert set(re.findall(r"worker (\d) +\| \[1\. 2\.\]", said)) == set("0123"), said
    assert said.count("(1 of 2)") <= 2
    assert said.count("the run is finished on all hosts") == 2


@pytest.mark.thorough
def test_over_ssh(machines):
    machines.put("ssh", SSH)
    (machines.home / "everywhere.sh").write_text(
        FILES["everywhere.sh"].replace("host1:6400", f"{machines.block}.1:6400")
    )
    process = machines.start("bash", "everywhere.sh", given="se cret\\\n")
    said = process.communicate(timeout=90)[0]
    trained(said)
    assert "se cret" not in said


@pytest.mark.thorough
def test_slurm(machines):
    machines.put("srun", SRUN)
    machines.put("scontrol", SCONTROL)
    (script,) = [block.text for block in BLOCKS if "srun" in block.text and block.language == "bash"]
    (machines.home / "train.sbatch").write_text(script)
    assert script.startswith("#!/bin/bash\n")
    process = machines.start("bash", "train.sbatch", SLURM_NNODES="2", SLURM_JOB_NODELIST="node[1-2]")
    said = process.communicate(timeout=90)[0]
    assert process.returncode == 0, said
    trained(said)


def manifests():
    return {one["kind"]: one for one in yaml.safe_load_all(FILES["training.yaml"])}


def commands():
    """Yields the command of each pod of the Job."""
    job = manifests()["Job"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    for _ in range(job["spec"]["completions"]):
        yield [*container["command"], *container["args"]]


def test_names_of_the_manifest_fit_together():
    found = manifests()
    secret, service, job = found["Secret"], found["Service"], found["Job"]
    template = job["spec"]["template"]
    (container,) = template["spec"]["containers"]
    assert template["metadata"]["labels"] == service["spec"]["selector"]
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["completions"] == job["spec"]["parallelism"]
    (variable,) = container["env"]
    assert variable["name"] == "REDISACC_PASSWORD"
    given = variable["valueFrom"]["secretKeyRef"]
    assert given["name"] == secret["metadata"]["name"]
    assert given["key"] in secret["stringData"]
    # The name of a pod of an indexed Job, in the domain of the Service.
    assert template["spec"]["subdomain"] == service["metadata"]["name"]
    for command in commands():
        assert command[command.index("--meet") + 1] == f"{job['metadata']['name']}-0.{service['metadata']['name']}:6400"
        assert command[command.index("--hosts") + 1] == str(job["spec"]["completions"])


@pytest.mark.thorough
def test_the_pods_of_the_manifest_train(machines):
    processes = [
        machines.start(
            *[part.replace("train-0.train", f"{machines.block}.1") for part in command],
            HOST_NAME=f"train-{index}",
            HOST_ADDRESS=f"{machines.block}.{index + 1}",
            REDISACC_PASSWORD=manifests()["Secret"]["stringData"]["password"],
        )
        for index, command in enumerate(commands())
    ]
    said = [process.communicate(timeout=90)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    trained("".join(said))


@pytest.mark.thorough
def test_one_machine_runs_as_the_page_says(tmp_path):
    first = next(number for number, block in enumerate(BLOCKS) if block.file == "train.py")
    Reader(PAGE, tmp_path, "").read(BLOCKS[first : first + 2])
