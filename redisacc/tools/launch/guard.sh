#!/bin/sh
# Ends the processes of a run when the process that started them is gone. guard.py starts this script.
#
# Arguments: GRACE
#   GRACE  whole seconds between SIGTERM and SIGKILL
# Standard input: a pipe with lines "SLOT PID". PID is the process that has SLOT from now on, which is also the id of its
#   process group; 0 if none has it. The end of the file means that the owner is gone.
#
# Only the kernel can report that the owner was killed: it closes the owner's end of the pipe. PR_SET_PDEATHSIG would
# reach only the children of the owner and not their children, and macOS lacks it.

# A shell reads a file command by command. It reads these braces as one command, so an upgrade of the package cannot
# change a running script.
{
    grace=$1
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
            if kill -"$1" -"${entry##*:}" 2>/dev/null; then any=0; fi
        done
        return "$any"
    }

    signal TERM || exit 0
    waited=0
    while [ "$waited" -lt "$grace" ] && signal 0; do
        sleep 1
        waited=$((waited + 1))
    done
    signal KILL
    exit 0
}
