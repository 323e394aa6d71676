"""Files of users: size limits, reading and writing."""
