"""Advice in messages: a test produces each in the situation in which it is right.

A message that tells its reader what to do is worse than none where that does not help. So each of them has an entry
here with the test that produces it, and a new one needs its own. What stands in `WITHOUT_A_TEST` was there before this
list: it only gets shorter.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import redisacc

PACKAGE = Path(redisacc.__file__).parent
TESTS = Path(__file__).parent.parent

# How advice begins, at the beginning of a message or of a clause in it.
VERBS = (
    "add|allow|apply|call|check|choose|connect|create|delete|enlarge|fill|give|install|leave|let|look|make|mend|move|name|"
    "open|pass|publish|put|read|rename|renew|retry|run|set|start|take|upgrade|use|wait"
)
ADVICE = re.compile(rf"(?:^|[.:;(]\s|, or |, and )(?:{VERBS})\b", re.IGNORECASE)
# What makes a message, besides classes of errors.
MAKERS = ("fail", "Finding", "warning", "Failure", "_warn", "BadParameter", "UsageError", "_refusal")
SHORTEST = 15
# Stands for what an f-string inserts.
INSERTED = "\0"

# How advice begins → the file of the test that produces it, and what that test says of the message.
PRODUCED = {
    "Start one with `redisacc server`": ("security/test_tls_errors.py", "Start one with `redisacc server`"),
    "connect to that name": ("security/test_tls_errors.py", "another name: connect to that"),
    "name the file of that authority's": (
        "security/test_tls_errors.py",
        "name the file of that authority's certificate",
    ),
    "name its files in the URL with ssl_certfile=FILE": ("security/test_tls_errors.py", "name its files in the URL"),
    "use one that an authority of the server has": ("security/test_tls_errors.py", "does not trust this client's"),
    "Check the files that ssl_ca_certs=": ("security/test_tls_errors.py", "Check the files that ssl_ca_certs="),
    "use redis:// instead of rediss://": ("security/test_tls_errors.py", "use redis:// instead of rediss://"),
    "pass the step that the gradient was computed for": ("behaviour/test_opening.py", "local_step is 0 by default"),
    "Publish with their number of partitions; or, if": (
        "behaviour/test_parameter_partitions.py",
        "somebody has begun to publish parameters",
    ),
    "give it, or set it by configure() or `redisacc s": ("behaviour/test_weights.py", "num_required is missing"),
    "run `redisacc reduce --node HOST:PORT` on the ma": ("cli/test_doctor.py", "--node"),
    "run doctor again during the training": ("cli/test_doctor.py", "during the training"),
    "run doctor as a user who may run INFO": ("cli/test_doctor.py", "test_doctor_as_a_user_who_may_do_little"),
    "give the reducer the same pattern as these": ("cli/test_failures.py", "access control list refuses"),
    "give --index or --top, not both": ("cli/test_options.py", "give --index or --top, not both"),
    "give the name of at least one accumulator": ("cli/test_options.py", "give the name of at least one accumulator"),
    "leave it out": ("cli/test_reduce.py", "names a node of a Redis Cluster, but"),
    "choose a leaf by its path, such as": ("cli/test_trees.py", "choose a leaf by its path, such as"),
    "use Python instead": ("cli/test_trees.py", "would be confused"),
    "connect-src 'self'; form-action 'self'; base-uri": ("dashboard/test_access.py", "default-src 'none';"),
    "set the environment variable": ("dashboard/test_access.py", "other machines could reach"),
    "give a file with --text": ("demo/test_demo_corpus.py", "give a file with --text"),
    "choose another one": ("embedded/test_cli_server.py", "is already in use on this machine: choose another one"),
    "choose another path": ("embedded/test_embedded.py", "is already in use"),
    "run pip install 'redisacc[server]', install redi": ("embedded/test_embedded.py", "pip install 'redisacc[server]'"),
    "make room on the disk, or start the server with": (
        "embedded/test_persistence.py",
        "could not be saved as a snapshot",
    ),
    "open another one by its name in the other proces": ("event_loop/test_handles.py", "belongs to an event loop"),
    "open one on this loop": ("event_loop/test_handles.py", "belongs to another event loop"),
    "use the class of the same name in redisacc.async": (
        "event_loop/test_handles.py",
        "blocks: use the class of the same name in redisacc",
    ),
    "retry() of this error acknowledges it; until the": (
        "failures/connections/test_unknown_outcome.py",
        "has been read, but the server stopped",
    ),
    "retry() of this error sends the same request aga": (
        "failures/connections/test_unknown_outcome.py",
        "unknown whether",
    ),
    "Set it to noeviction: CONFIG SET maxmemory-polic": (
        "failures/servers/test_memory.py",
        "CONFIG SET maxmemory-policy noeviction",
    ),
    "name its master, or go through Sentinel": ("failures/servers/test_replicas.py", "is a read-only replica"),
    "apply what the function returns": ("foreign/test_tensorflow.py", "has no values"),
    "create it on another device": ("foreign/test_tensorflow.py", "has no values"),
    "call to_tensor() first, with a number for what i": ("foreign/test_torch.py", "mask would be lost"),
    "call filled() first": ("foreign/test_torch.py", "mask would be lost"),
    "fill them first": ("hostile/test_arguments.py", "missing values"),
    "give --redis or --server, not both": ("launch/test_run.py", "give --redis or --server, not both"),
    "give at least one worker, or leave out --no-chie": ("launch/test_run.py", "nothing is left to run"),
    "run doctor once as a user who may, such as an op": ("security/test_roles.py", "as a user who may"),
    "run `redisacc load-scripts` as a user who may (": ("security/test_roles.py", "redisacc load-scripts"),
    "run `redisacc load-scripts` as an operator: only": ("security/test_roles.py", "redisacc load-scripts"),
    "give redis= a URL": ("security/test_tls_errors.py", "is not a node of a Redis Cluster: give redis= a URL"),
    "Look whether a server runs there. If it does not": (
        "security/test_tls_errors.py",
        "use redis:// instead of rediss://",
    ),
    "publish() needs the round of a loop over rounds(": ("training/test_loop.py", "needs the round of a loop"),
    "apply() needs the step of a loop over steps()": ("training/test_loop.py", "needs the step of a loop"),
    "with Parameters.publish() if you have them, or": (
        "training/test_lost_data.py",
        "has begun, but the parameters are those of step",
    ),
    "Rename it": ("unit/test_tree_structure.py", "has two leaves with the path"),
}
# Clauses that begin like advice and are none.
NO_ADVICE = (
    "name must be text or None, not",
    ", not a number of replicas",
    "WAIT cannot be used with replica instances",
    "and create=False forbids to create one",
    "and create=False requires it",
    "create=False requires a shared_name: a private a",
)
WITHOUT_A_TEST = (
    "run doctor as a user who may run CLUSTER NODES and INFO",
    "Renew the server's certificate",
    ", or apply it to a SparseConditionalAccumulator",
    ":// unless the network is trusted",
    "Call publish() once in the body of the loop",
    "Install it again",
    "Open it again",
    "Open it by name",
    "Open them again",
    "Publish the values again, for this step or a lat",
    "Take rounds, which still works and frees memory,",
    "Take the round, or create the accumulator with a",
    "Upgrade to redis-py 8.0.1 or later, or give the",
    "allow the channels redisacc:*; without events, a",
    "call start() or use a with block",
    "call to_padded_tensor() first",
    "call to_tensor() first",
    "call update_layout(n_batch=0) first",
    "choose the same numbers of masters and replicas,",
    "connect to the primary, or through Sentinel",
    "delete them when their training is over and crea",
    "delete them with the version that published them",
    "give --cluster or --socket, not both",
    "give --port or --socket, not both",
    "give a port or a socket, not both",
    "give all processes the same options, and the sam",
    "give either --output FILE or --discard, which th",
    "give every master a replica, because a master wi",
    "give it a URL",
    "give it, or the environment variable",
    "give redis= a URL redis+cluster://HOST:PORT, or",
    "give the reducer a processor core of its own, an",
    "leave out what follows the slash",
    "mend the server first",
    "move the server closer, because a small gradient",
    "move them to others before it goes",
    "or delete its keys",
    "or later",
    "or leave this one out",
    "or start both with `redisacc server --reduce`: t",
    "pass a BCOO, which jax.experimental.sparse.BCOO.",
    "pass its dequantize(), or its int_repr() if the",
    "pass its full_tensor(), or its to_local() to an",
    "read the server's log; the disk may be full",
    "read them with the version that published them",
    "run CONFIG SET maxmemory, so that a full server",
    "run a time service; otherwise, times in `tail` a",
    "set REDISACC_SERVER to the path of a newer serve",
    "set a password or an ACL, because anybody who re",
    "set cluster-announce-hostname on every node, or",
    "set cluster-announce-ip, or cluster-announce-hos",
    "start it again, or promote a replica of it: accu",
    "start the masters that are missing, or assign th",
    "take rounds or delete accumulators, or give the",
    "use a server that runs Lua scripts, because ever",
    "use a server with these libraries; without struc",
    "use another server",
    "use it in async with, or await it before its met",
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
    """Yields what errors, failures, findings and warnings say, and the texts of constants and tables."""
    for node in ast.walk(tree):
        found: list[ast.AST] = []
        match node:
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
                if name.endswith("Error") or name in MAKERS:
                    found = [*node.args, *(keyword.value for keyword in node.keywords)]
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                found = [value] if name.isupper() else []
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


KNOWN = (*PRODUCED, *NO_ADVICE, *WITHOUT_A_TEST)


def test_all_advice_is_listed():
    unlisted = {text: where for text, where in advice().items() if not any(known in text for known in KNOWN)}
    assert unlisted == {}, "name the test that produces it in the situation in which it is right"


def test_nothing_else_is_listed():
    found = advice()
    assert [known for known in KNOWN if not any(known in text for text in found)] == []


def test_the_tests_that_produce_it_are_there():
    missing = [
        (file, said)
        for file, said in PRODUCED.values()
        if said
        not in re.sub(r"\\\\|[\"']\s*\n\s*f?r?[\"']", "", (TESTS / file).read_text(encoding="utf-8")).replace("\\", "")
    ]
    assert missing == []
