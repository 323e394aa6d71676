"""The wire between the hub of a parameter server and its workers.

Everything is a request with a reply. Each request is executed at most once, over as many
connections as it takes; a hub that was started anew knows of none, and its workers are told so.
"""

from paceline.wire.client import Client
from paceline.wire.frames import Buffer
from paceline.wire.identity import Identity
from paceline.wire.inbox import Event, Joined, Lost, Request, Woken
from paceline.wire.keys import ClientKeys, HubKeys, generate, load_client, load_hub
from paceline.wire.messages import Message
from paceline.wire.outbox import HubRestarted, Pending
from paceline.wire.service import Service
from paceline.wire.traffic import Count, Traffic

__all__ = [
    "Buffer",
    "Client",
    "ClientKeys",
    "Count",
    "Event",
    "HubKeys",
    "HubRestarted",
    "Identity",
    "Joined",
    "Lost",
    "Message",
    "Pending",
    "Request",
    "Service",
    "Traffic",
    "Woken",
    "generate",
    "load_client",
    "load_hub",
]
