"""The native module itself, without the server around it."""
