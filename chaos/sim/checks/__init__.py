"""The promises that must hold in every story, each checked. Workers report what they are about to do and what they see.

sums    contents of every pull under no bound and under bounded delay, and what is left at the end
rounds  one decision for each round, of everybody who takes part, its mean in the order of worker ids
shards  each shard in one living hand, trained once, and done when its step is committed
views   which servers get ranges in a view, and how many ranges move
answers each answer once, to the connection that asked
"""
