"""The commands of `kvserver`, one file each."""
