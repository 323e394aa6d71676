"""Exchange requests and replies between workers and the hub, a parameter server, over ZeroMQ.

`server` is for the hub, `client` for a worker. The hub executes a request at most once, even if the
worker sends it again over a new connection. After a restart of the hub, workers get HubRestarted.
"""
