"""What L1 and L2 hold, told to whoever routes requests.

`types` what observers are told; `hub` makes it of the loop's events and knows what is in each chunk, which `descriptions`
reads out of stores; `observers` runs each observer in a thread of its own; `ledger` counts blocks for them. The rest are
observers: `publisher` (ZMQ), `feed` (engines that publish themselves), `index` (what matches a prompt), `lines` (a file).
"""
