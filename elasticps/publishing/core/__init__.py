"""The decisions of publishing: what is written next, and in which form."""
