"""`elasticps launch`: etcd, a coordinator and servers beside the workers' command, on one machine or many."""
