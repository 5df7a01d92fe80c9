"""The compiled path: usual frames are handled where they were received, in one call per buffer."""
