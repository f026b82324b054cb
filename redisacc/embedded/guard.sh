#!/bin/sh
# Ends processes when the process that started them is gone. guarded_process.py starts this script.
#
# Arguments: GRACE DIRECTORY
#   GRACE      whole seconds between SIGTERM and SIGKILL, counted while no snapshot grows
#   DIRECTORY  directory to remove after the processes have ended, or ""
# Standard input: a pipe with lines "SLOT PID". PID is the process that has SLOT from now on, which is also the id of its
#   process group; 0 if none has it. The end of the file means that the owner is done or gone.
#
# Only the kernel can report that the owner was killed: it closes the owner's end of the pipe. PR_SET_PDEATHSIG would
# fire when the thread that started a process ends, would not reach the children of a process, and macOS lacks it.

# A shell reads a file command by command. It reads these braces as one command, so an upgrade of the package cannot
# change a running script.
{
    grace=$1
    directory=$2
    trap '' TERM INT HUP

    entries=
    while read -r slot pid; do
        kept=
        for entry in $entries; do
            [ "${entry%%:*}" = "$slot" ] || kept="$kept $entry"
        done
        entries=$kept
        [ "$pid" = 0 ] || entries="$entries $slot:$pid"
    done

    # Sends a signal to each group. Fails if there is none.
    signal() {
        any=1
        for entry in $entries; do
            if kill -"$1" -"${entry##*:}"; then any=0; fi
        done
        return "$any"
    }

    # A server that is writing its last snapshot to temp-PID.rdb, in the working directory, gets the time that it needs.
    snapshots() {
        for entry in $entries; do wc -c <"temp-${entry##*:}.rdb"; done
    }

    if signal TERM; then
        waited=0
        saved=
        while [ "$waited" -lt "$grace" ] && signal 0; do
            sleep 1
            before=$saved
            saved=$(snapshots)
            if [ "$saved" = "$before" ]; then waited=$((waited + 1)); else waited=0; fi
        done
        signal KILL
    fi
    [ -z "$directory" ] || rm -rf -- "$directory"
    exit 0
}
