"""Send workers' requests to the hub, which is a parameter server, and replies back, over ZeroMQ.

`server` is for the hub, `client` for a worker. The hub executes a request at most once, even if the
worker sends it again over a new connection. After a restart of the hub, workers get HubRestarted.
"""
