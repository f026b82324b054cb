#!/bin/sh
# Runs a server for as long as its owner lives. supervisor.py passes this text to `sh -c`.
#
# Arguments: GRACE DIRECTORY COMMAND [ARGUMENT...]
#   GRACE      whole seconds between SIGTERM and SIGKILL once the owner is gone, counted while the server's snapshot does
#              not grow
#   DIRECTORY  directory to remove after the server has ended, or ""
#   COMMAND    command that runs the server in the foreground
# File descriptors:
#   0  one end of a socket pair. The owner holds the other end, reads the server's process id from it, and closes it
#      to end the server.
#   1  the lock file of the data directory
#   2  the log
# Exit status: that of the server.
#
# The script leads a process group of its own, and ends what is left of it when the server has ended.
#
# Only the kernel can report that the owner was killed: it closes the owner's end of the socket pair. PR_SET_PDEATHSIG
# would fire when the thread that started the server ends, and macOS lacks it.

grace=$1
directory=$2
shift 2

server=
trap '[ -z "$server" ] || kill -TERM "$server" 2>/dev/null' TERM INT HUP
exec 3<&0 4>&1 1>&2 </dev/null

# The server inherits descriptor 4, so the directory stays locked for as long as any process can write into it.
"$@" 3<&- &
server=$!

# The watcher ends the server once the owner's end of the pair is closed. A server that is writing its last snapshot to
# temp-PID.rdb, in the working directory, gets the time that it needs. The watcher closes descriptor 4, because
# otherwise its last `sleep` would keep the directory locked after the server has ended.
(
    exec 4>&- >/dev/null 2>&1
    read -r _ <&3
    kill -TERM "$server"
    waited=0
    saved=
    while [ "$waited" -lt "$grace" ] && kill -0 "$server"; do
        sleep 1
        before=$saved
        saved=$(wc -c <"temp-$server.rdb")
        if [ "$saved" = "$before" ]; then waited=$((waited + 1)); else waited=0; fi
    done
    kill -KILL "$server"
) &
watcher=$!

# An owner that is already gone must not end this script by SIGPIPE. Ignored only now, because the server would
# inherit it.
trap '' PIPE
echo "$server" >&3
exec 3<&-

# `wait` also returns when a signal runs the trap, while the server is still alive.
while :; do
    wait "$server"
    status=$?
    kill -0 "$server" 2>/dev/null || break
done

# SIGKILL, because a subshell that dash has just forked still has the trap above, which would swallow SIGTERM.
kill -KILL "$watcher" 2>/dev/null
wait "$watcher" 2>/dev/null
# A server that was killed while it saved a snapshot or rewrote its append-only file leaves a child that goes on, and
# that keeps the directory locked meanwhile. SIGUSR1 is how a server ends such a child. It goes to the whole group,
# in which the watcher leaves its last `sleep`.
trap '' USR1
kill -USR1 0
[ -z "$directory" ] || rm -rf -- "$directory"
exit "$status"
