"""Values that clients, servers and files share: table specifications, optimizers, filters, caches, shards. Pure."""
