"""What the adapter of any engine needs: the link to the daemon, memory and planes to register, copies and how they are sent."""
