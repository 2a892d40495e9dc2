"""One module at a time, in process."""
