"""The demo: a recommender trained on real ratings through the servers, beside the same model in one plain process."""
