"""What the adapter of any engine needs; knows no engine.

`link` keeps the connection to the daemon in a thread of its own. A scheduler sends through `dispatcher`, which passes
on the replies: `lookups`, and the `introduction` of the engine; `announced` blocks are not announced twice, and
`speed` is that of prefill. `planes` and `memory` turn tensors into planes and registered memory, which `host_memory`
or `cuda_memory` (with `cuda_driver`) hand over by the contract in `exporter`. `specs` describe one load and one
store; `send_queue` sends their messages once the engine's own work on the blocks is done; `copies` is the state word
of a copy in flight, and `endings` what follows from it, which the `worker` half carries out; `steps` is what the halves send each other, and `stats` what they
report; `faults` are exceptions that are kept from the engine, `settings` what an operator may set.
`hazards` are blocks that a copy still reads or may write; `weights` are digests of a model's files.

In the engine's front end: `cache_status` is whether an engine has its cache, and why not; `watch` queries the daemon for it,
`board` shows it as gauges, and `engine_stats` sends the engine's stats to the daemon.
"""
