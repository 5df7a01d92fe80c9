"""Says what is wrong with a machine, or the way to a cluster: `core` judges facts, `facts` gathers them."""
