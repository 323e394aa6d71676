"""Requests and replies between a parameter server's hub and its workers, over ZeroMQ.

`server` and `client` are the two ends. Each request is executed at most once, even if it takes
several connections. A restarted hub knows no earlier requests, and its workers are notified.
"""
