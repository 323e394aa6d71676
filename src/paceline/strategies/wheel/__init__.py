"""Strategy wheel: convolutions out there, fully-connected layers beside the parameter server."""
