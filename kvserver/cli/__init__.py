"""Commands of `kvserver`, one file each."""
