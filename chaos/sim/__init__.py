"""Real servers, leaders and clients in one process, on virtual time and on links that break by a plan.

The code that runs is `elasticps.server`, `elasticps.client` and `coordinator` themselves; virtual are the things that
an operating system provides: time, event loops, threads and sockets. So nothing here knows the protocol but the checks.

    clock      one time for all processes, which take turns    loop       an event loop on it, one per process
    network    sockets whose bytes travel over bad links       transport  asyncio's transports over such sockets
    threads    a client's threads, sockets and waits           store      the coordination store behind such links
    cluster    builds and kills processes                      programs   the programs of workers
    story      a seed's plan: processes and faults             checks     the promises, each checked
    run        plays a seed from beginning to end
"""
