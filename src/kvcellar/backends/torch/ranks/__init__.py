"""Several processes that compute one model together: tensor parallelism.

Imports runners, loading and learning; only loading.py imports this room.

The process that asks for the model is rank 0 and leads: it has the engine, the bookkeeping of
every cache and its own part of the model. The others follow: each has its part of the model and the
rows of its KV heads, and is told what to run. ``parts.py`` is a rank's part of a model,
``commands.py`` what followers are told, ``processes.py`` the processes, ``leading.py`` the leader's
end and ``following.py`` the other one.
"""
