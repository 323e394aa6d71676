"""The verbs train and rehearse: sessions, folders, workers."""
