"""What a server does for workers, other replicas and leaders: one module for each part of the protocol."""
