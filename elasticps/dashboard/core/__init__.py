"""The page's model, pure: events and times in, plain values out."""
