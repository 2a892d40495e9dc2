"""What tests share: a real daemon process and an engine worker with real shared memory."""
