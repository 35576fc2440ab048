"""OpenAI's wire: what comes in, what goes out, and what an error looks like.

errors — every failure as OpenAI's body, status and headers
parameters — what a request may say, and what is refused by name
requests — bodies of /v1/chat/completions and /v1/completions
responses — their answers, whole and in chunks, and the list of models
logprobs — how likely the tokens of an answer were
forms — how an answer is put into them
limits — the x-ratelimit headers, and the error when a limit is reached
"""
