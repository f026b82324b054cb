#!/bin/sh
# Ends a server when its owner is gone. guarded_process.py starts this script as the leader of the server's process group.
#
# Arguments: GRACE DIRECTORY
#   GRACE      whole seconds between SIGTERM and SIGKILL, counted while the server's snapshot does not grow
#   DIRECTORY  directory to remove after the server has ended, or ""
# Standard input: one end of a socket pair. The owner writes the server's process id, and an empty line once it has
#   waited for the server. The end of the file means that the owner is done or gone.
#
# Only the kernel can report that the owner was killed: it closes the owner's end of the socket pair. PR_SET_PDEATHSIG
# would fire when the thread that started the server ends, and macOS lacks it.
#
# Signals go to the process group and never to a process id, which might be somebody else's by now.

# A shell reads a file command by command. It reads these braces as one command, so an upgrade of the package cannot
# change a running script.
{
    grace=$1
    directory=$2
    trap '' TERM INT HUP

    server=
    while read -r line; do server=$line; done

    if [ -n "$server" ]; then
        kill -TERM 0
        # A server that is writing its last snapshot to temp-PID.rdb, in the working directory, gets the time that it
        # needs.
        waited=0
        saved=
        while [ "$waited" -lt "$grace" ] && kill -0 "$server"; do
            sleep 1
            before=$saved
            saved=$(wc -c <"temp-$server.rdb")
            if [ "$saved" = "$before" ]; then waited=$((waited + 1)); else waited=0; fi
        done
    fi
    [ -z "$directory" ] || rm -rf -- "$directory"
    # This also ends the script itself, and what a killed server leaves: a child that saves a snapshot or rewrites the
    # append-only file, and that keeps the directory locked meanwhile.
    kill -KILL 0
    exit
}
