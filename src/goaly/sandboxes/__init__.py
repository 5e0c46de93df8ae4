"""Sandboxes: isolated machines in which a policy's commands run and its work is judged.

`contract.py` and `sandbox.py` have what every backend promises. `namespaces.py` is the default backend: Linux
namespaces, started by a small server in C (`native/`). `containers.py` uses Docker or Podman, `remote.py` the sandboxes
of other machines. Nothing here knows of episodes or rewards.
"""
