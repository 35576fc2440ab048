"""One machine: the servers, the model and the processes of a running system, under one folder.

errors — what goes wrong, each told in one line that says what to do next
ports — free TCP ports
checks — what can be known to be wrong before anything is started
folder — who holds the home, where things lie in it, what stays the same from run to run
guard — the process that outlives a killed supervisor, and ends what it left
children — processes of ours, each with a group, a log and an end
account — whom PostgreSQL runs as, and where its files may lie
postgres — PostgreSQL as a child
valkey — Valkey as a child
stores — where the system keeps its state: these two, or servers that the user has
model — the weights, fetched once
books — tables, first keys and examples
metrics — the folder of Prometheus numbers that the processes share
readiness — how to see from outside that a process is ready
supervisor — starts parts, keeps them running, ends them in order
roster — the processes: name, command, environment, readiness
greeting — what `pennyweight up` says when all runs
up — the sequence from a folder to a running system, and back
"""
