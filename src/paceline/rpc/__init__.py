"""Requests and replies between the hub of a parameter server and its workers, over ZeroMQ.

Each request is executed at most once, over as many connections as it takes. A hub that was started
anew knows of no earlier request, and its workers are told so. `server` and `client` are the two
ends.
"""
