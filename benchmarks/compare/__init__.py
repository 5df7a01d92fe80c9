"""What a user would take instead of elasticps, on the same DLRM and the same clicks: `elasticps bench compare`."""
