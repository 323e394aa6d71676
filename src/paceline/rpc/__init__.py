"""Exchange requests and replies between workers and the hub, a parameter server, over ZeroMQ.

`server` is for the hub, `client` for a worker. The hub executes a request at most once, even if the
worker sends it again over a new connection. If the hub is restarted, a worker's requests without a
reply raise HubRestarted.
"""
