"""Files and commands by which launchers and clusters start a training of several machines."""
