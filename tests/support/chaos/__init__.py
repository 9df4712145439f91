"""Faults of every kind under load of every kind: what `tests/faults/test_chaos.py` is made of.

- `schedule`: which fault hits which worker when. Pure.
- `cases`: the requests, and the answers that they have without faults.
- `asking`: one request over a socket, with the manners of good and bad clients.
- `load`: many clients at once, and what became of their requests.
- `conductor`: carries out a schedule on a deployment.
"""
