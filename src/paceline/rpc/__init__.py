"""Requests and replies between a parameter server's hub and its workers, over ZeroMQ.

`server` is the hub's end, `client` a worker's end. Each request is executed at most once, even if
it is sent over several connections. A restarted hub knows no earlier requests, and notifies its
workers.
"""
