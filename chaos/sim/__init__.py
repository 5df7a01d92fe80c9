"""Servers, leaders and clients as they are, in one process, on virtual time and links that break when told to.

What runs is `elasticps.server`, `elasticps.client` and `coordinator` themselves, with their event loops, threads and
sockets; what is virtual is what an operating system gives them. So nothing here knows the protocol but the checks.

    clock      one time for all, and whose turn it is          loop       an event loop on it, one per process
    network    sockets whose bytes travel over bad links       transport  asyncio's transports over such sockets
    threads    a client's threads, sockets and waits           store      the coordination store behind such links
    cluster    builds and kills processes                      programs   what workers do
    story      a seed's plan: who, and what goes wrong         checks     what must hold
    run        a seed from beginning to end
"""
