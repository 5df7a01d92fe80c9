"""Has a platform run as many servers as the policy in `coordinator.core.autoscale` says: on Kubernetes, replicas."""
