"""Records in files: settings, results, machine files."""
