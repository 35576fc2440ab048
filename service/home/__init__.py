"""One machine: the servers, the model and the processes of a running system, under one folder.

errors — what goes wrong, each one line that says what to do next
ports — free TCP ports
guard — the process that outlives a killed supervisor, and ends what it left
children — processes of ours, each with a group, a log and an end
account — whom PostgreSQL runs as, and where its files may lie
postgres — PostgreSQL as a child
valkey — Valkey as a child
model — the weights, fetched once
"""
